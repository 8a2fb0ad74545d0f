"""Owns the command `trellis-prep`: its arguments, exit codes and streams.  It must not know how bytes move.

Exit codes: 0 when everything was prepared or planned, 1 when a layer could not be, 2 when the checkpoint cannot be
opened, stdout cannot be written or the command is used wrongly, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.errors import FormatError
from trellis_format.exl3.layers import LayerKey
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.terminal import complain, emit, keep_printing, printable
from trellis_format.version import version
from trellis_prep.bench_cli import add_bench, report_json, run_bench, write_bench_text
from trellis_prep.cache import CacheWarning, PreparedCache
from trellis_prep.cli_report import LayerRow, ProgressLine, RunReport, write_text
from trellis_prep.devices import resolve_device
from trellis_prep.errors import PrepError, PrepValueError
from trellis_prep.extents import check_index
from trellis_prep.measure import Meter
from trellis_prep.plan import PreparationPlan, plan_preparation
from trellis_prep.preparation import prepare
from trellis_prep.stage import StagingBuffer
from trellis_prep.staging import TrellisStaging
from trellis_prep.survey import open_layers, parse_layers, rank_share, read_sample, select_layers

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_UNUSABLE", "main"]

EXIT_OK = 0
"""Every layer was prepared or planned."""
EXIT_FAILED = 1
"""A layer could not be."""
EXIT_UNUSABLE = 2
"""The checkpoint cannot be opened, stdout cannot be written, or the command is used wrongly."""
EXIT_INTERRUPTED = 130
"""Interrupted from the keyboard."""
_PROGRAM = "trellis-prep"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: those of the command line, without the program; default: `sys.argv`.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        keep_printing(stream)
    return _bench(options) if options.command == "bench" else _prepare(options)


def _bench(options: argparse.Namespace) -> int:
    try:
        measured = run_bench(options)
    except (PrepError, FormatError) as error:
        return _complain(str(error), EXIT_UNUSABLE)
    except KeyboardInterrupt:
        return _complain("interrupted; everything that was taken is free again", EXIT_INTERRUPTED)
    code = EXIT_OK if all(it.is_exact for it in measured) else EXIT_FAILED
    if options.json:
        return _emit(lambda: sys.stdout.write(json.dumps(report_json(measured), indent=2) + "\n"), code)
    return _emit(lambda: write_bench_text(measured, sys.stdout), code)


def _prepare(options: argparse.Namespace) -> int:
    try:
        staging = TrellisStaging(max_experts=options.max_experts, max_bytes=options.max_bytes, readers=options.readers)
        device = resolve_device(options.device)
        if options.tp_size < 1:
            raise PrepValueError(f"--tp-size must be at least 1, got {options.tp_size}")
        check_index("--tp-rank", options.tp_rank, options.tp_size)
        if options.cache and os.path.exists(options.cache) and not os.path.isdir(options.cache):
            raise PrepValueError(f"--cache {options.cache}: a cache is a folder, and this is none")
        checkpoint = open_checkpoint(options.checkpoint)
        keys = select_layers(checkpoint, options.layers)
    except (PrepError, FormatError) as error:
        return _complain(str(error), EXIT_UNUSABLE)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    try:
        with checkpoint, _plain_warnings():
            report = (_plan if options.dry_run else _run)(options, checkpoint, keys, staging, device)
    except (PrepError, FormatError) as error:
        return _complain(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; everything that was taken is free again", EXIT_INTERRUPTED)
    if options.json:
        return _emit(lambda: sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n"), EXIT_OK)
    return _emit(lambda: write_text(report, sys.stdout), EXIT_OK)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Tell warnings in one line each, without the place in the sources that gave them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", CacheWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"trellis-prep: warning: {message}", file=sys.stderr)
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Share the experts of a checkpoint over ranks and stream a share to its device.",
        epilog="exit codes: 0 done, 1 a layer cannot be prepared, 2 the checkpoint cannot be opened, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "prepare",
        help="prepare a rank's share of each layer and say what it took; --dry-run says what it will take",
        description="Prepare a rank's share layer by layer, each freed before the next, and say what it took.",
    )
    defaults = TrellisStaging()
    command.add_argument("--checkpoint", required=True, metavar="DIR", help="folder with safetensors files")
    command.add_argument("--layers", type=_layers, metavar="LIST", help="layers such as 0-3,7; default: all")
    command.add_argument("--tp-size", type=int, default=1, metavar="W", help="ranks that share the intermediate axis")
    command.add_argument("--tp-rank", type=int, default=0, metavar="R", help="the rank to prepare for")
    command.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: cpu")
    command.add_argument(
        "--max-bytes", type=int, default=defaults.max_bytes, metavar="N", help="bytes of all host slots together"
    )
    command.add_argument(
        "--max-experts", type=int, default=defaults.max_experts, metavar="N", help="experts of a batch"
    )
    command.add_argument("--readers", type=int, metavar="N", help="threads that fill slots; default: chosen by cores")
    command.add_argument("--cache", metavar="DIR", help="folder of prepared shares to read from and add to")
    command.add_argument("--dry-run", action="store_true", help="plan, and read one expert to expect a time")
    command.add_argument("--json", action="store_true", help="write JSON, and nothing else, to stdout")
    add_bench(commands)
    return parser


def _layers(text: str) -> tuple[int, ...]:
    try:
        return parse_layers(text)
    except PrepError as error:
        raise argparse.ArgumentTypeError(printable(str(error))) from error


def _plan(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    keys: Sequence[LayerKey],
    staging: TrellisStaging,
    device: torch.device,
) -> RunReport:
    plans: list[tuple[LayerKey, PreparationPlan]] = []
    sample = (0, 0.0)
    for key, source, weights in open_layers(checkpoint, keys):
        plan = _plan_layer(options, source, staging)
        plans.append((key, plan))
        if not sample[0]:
            sample = read_sample(plan, weights)
    pace = sample[1] / sample[0] if sample[0] else None
    rows = [_row(key, plan, None if pace is None else pace * plan.layout.total_bytes) for key, plan in plans]
    return _report(options, device, staging, rows, sample)


def _run(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    keys: Sequence[LayerKey],
    staging: TrellisStaging,
    device: torch.device,
) -> RunReport:
    cache = PreparedCache(options.cache) if options.cache else None
    rows = []
    with StagingBuffer(device) as buffer:
        for number, (key, source, weights) in enumerate(open_layers(checkpoint, keys), start=1):
            plan = _plan_layer(options, source, staging)
            if sys.stderr.isatty():
                sys.stderr.write(f"layer {key.index}, {number} of {len(keys)}\n")
            rows.append(_prepare_layer(key, plan, weights, buffer, cache))
    return _report(options, device, staging, rows, (0, 0.0))


def _plan_layer(options: argparse.Namespace, source: TrellisSource, staging: TrellisStaging) -> PreparationPlan:
    return plan_preparation(source, extent=rank_share(source, options.tp_rank, options.tp_size), staging=staging)


def _prepare_layer(
    key: LayerKey,
    plan: PreparationPlan,
    weights: TrellisWeights,
    buffer: StagingBuffer,
    cache: PreparedCache | None,
) -> LayerRow:
    line = ProgressLine(sys.stderr, plan.layout.total_bytes)
    run = prepare if cache is None else cache.prepare
    try:
        with Meter(buffer.device) as meter:
            run(
                plan.layout.source,
                weights,
                device=buffer.device,
                staging=plan.staging,
                buffer=buffer,
                extent=plan.layout.extent,
                progress=lambda done, _: line.update(done),
            )
    finally:
        line.finish()
    measured = meter.measured
    assert measured is not None  # the context ended without an error
    return _row(key, plan, measured.seconds, *measured.above(plan.layout.total_bytes))


def _row(
    key: LayerKey, plan: PreparationPlan, seconds: float | None, host: int | None = None, device: int | None = None
) -> LayerRow:
    extent = plan.layout.extent
    return LayerRow(
        layer=key.index,
        path=key.prefix,
        first_channel=extent.first_channel,
        channels=extent.width,
        owners=plan.owners,
        staging_bytes=plan.host_bytes,
        seconds=seconds,
        host_peak_above_weights=host,
        device_peak_above_weights=device,
    )


def _report(
    options: argparse.Namespace,
    device: torch.device,
    staging: TrellisStaging,
    rows: Sequence[LayerRow],
    sample: tuple[int, float],
) -> RunReport:
    return RunReport(
        checkpoint=str(options.checkpoint),
        device=str(device),
        tp_rank=options.tp_rank,
        tp_size=options.tp_size,
        max_bytes=staging.max_bytes,
        dry_run=options.dry_run,
        sampled_bytes=sample[0],
        sampled_seconds=sample[1],
        layers=tuple(rows),
    )


def _emit(write: Callable[[], object], code: int) -> int:
    return emit(_PROGRAM, write, code, unwritable=EXIT_UNUSABLE)


def _complain(message: str, code: int) -> int:
    complain(_PROGRAM, message)
    return code
