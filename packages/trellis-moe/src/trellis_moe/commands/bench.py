"""Owns `trellis-moe bench`: what is measured and where its receipt goes.  It must not know how anything is measured."""

from __future__ import annotations

import argparse
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trellis_moe.errors import MoeError, MoeValueError

if TYPE_CHECKING:
    from trellis_moe.bench.suite import LayerRun, Suite

__all__ = ["add_parser"]

_MEASURING = {
    "layer": "whole layers, in a CUDA graph and launched from Python",
    "op": "single ops: decode, rotations, packing, sums",
    "prepare": "the way of weights to the device, beside plain copies of as many bytes",
    "ceiling": "what the device does at the most: copying, multiplying, decoding",
    "compare": "layers in turns with grouped GEMMs of bf16 weights, decoded before or in each launch, and with a CPU",
    "all": "everything that the tables of the documentation show",
}
_SECONDS = 540.0
_COUNTS = (1, 8, 1024)  # tokens of a layer that no suite has
_MULTIPROCESSORS = 132  # of an H100 SXM or an H200, which plans for a target without a device suppose


def add_parser(commands: Any, tell: Callable[[str], None]) -> None:
    """Add `bench` to the subcommands of the command line.

    Args:
        commands: what `ArgumentParser.add_subparsers` gave.
        tell: says a line on stderr.
    """
    bench = commands.add_parser("bench", help="measure, and make tables and plots from receipts")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    for name, text in _MEASURING.items():
        one = kinds.add_parser(name, help=text, description=f"Measure {text}, and write a receipt.")
        one.set_defaults(command=lambda options, name=name: _measure(options, name, tell))
        one.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"folder that gets {name}.json")
        one.add_argument("--commit", metavar="SHA", help="of the sources; needed where they are no git checkout")
        one.add_argument("--dirty", action="store_true", help="say that the sources differ from that commit")
        one.add_argument(
            "--seconds", type=float, default=_SECONDS, help=f"begin nothing after that long ({_SECONDS:g})"
        )
        one.add_argument("--samples", type=int, default=12, help="of each row, 5 to 64 (default 12)")
        one.add_argument("--device", choices=("cpu", "cuda"), help="default cuda; cpu rehearses on a tiny layer")
        one.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one for each CPU)")
        one.add_argument("--compile-only", action="store_true", help="fill the cache of kernels, and measure nothing")
        one.add_argument("--arch", metavar="ARCH", help="compile for this target, as sm_90a; needs no GPU")
        one.add_argument(
            "--asked", action="store_true", help="only what figures were asked for, not what surrounds them"
        )
        if name == "all":
            one.add_argument(
                "--without", nargs="+", default=(), choices=_MEASURING.keys() - {"all"}, metavar="PART",
                help="parts to leave out: layer, op, prepare, ceiling, compare",
            )  # fmt: skip
        if name in ("layer", "compare", "all"):
            one.add_argument(
                "--preset", nargs="+", metavar="MODEL[:CODEBOOK:K]", help="only these layers (default: all presets)"
            )
            one.add_argument("--tokens", nargs="+", type=int, metavar="N", help="only these token counts")
    for name, text, command in (
        ("tables", "make the tables of the documentation from its receipts", _tables),
        ("plot", "draw the plots of the documentation from its receipts", _plot),
        ("publish", "check receipts and put them into the documentation", _publish),
        ("schema", "print the JSON schema of a receipt", _schema),
    ):
        one = kinds.add_parser(name, help=text)
        one.set_defaults(command=command)
        one.add_argument("--root", type=Path, default=Path(), help="folder of the repository (default: this one)")
        if name == "tables":
            one.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a table is stale")
        if name == "publish":
            one.add_argument("receipts", type=Path, nargs="+", metavar="FILE", help="receipts; their names are kept")


def _measure(options: argparse.Namespace, name: str, tell: Callable[[str], None]) -> int:
    from trellis_moe.bench.machine import find_commit
    from trellis_moe.bench.record import Recorder
    from trellis_moe.bench.suite import run
    from trellis_moe.commands.layer import choose_device
    from trellis_moe.receipts.store import write

    if not 5 <= options.samples <= 64:
        raise MoeValueError(f"--samples must be 5 to 64, got {options.samples}")
    if options.jobs is not None and options.jobs < 1:
        raise MoeValueError(f"--jobs must be at least 1, got {options.jobs}")
    if options.arch and not options.compile_only:
        raise MoeValueError(
            f"--arch {options.arch} goes with --compile-only; what is measured runs on the device there is"
        )
    if options.compile_only:
        return _precompile(options, name, tell)
    device = choose_device(options.device or "cuda")
    commit = find_commit(options.commit, dirty=options.dirty)
    recorder = Recorder(device, seconds=options.seconds, samples=options.samples, tell=tell)
    suite, path = _suite(options, device.type), options.out / f"{name}.json"
    interrupted = False

    def keep() -> None:
        if recorder.rows:
            try:
                write(recorder.receipt(_command(name, options), commit, goes_on=True), path)
            except MoeError as error:
                tell(f"    not kept yet: {error}")

    try:
        with _termination_interrupts():
            run(recorder, suite, _parts(name, options), jobs=options.jobs, keep=keep)
    except KeyboardInterrupt:
        interrupted = True  # what was measured is kept
        recorder.skip("the rest", "interrupted")
    write(recorder.receipt(_command(name, options), commit), path)
    tell(f"{len(recorder.rows)} rows in {recorder.elapsed:.0f} s: {path}")
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _precompile(options: argparse.Namespace, name: str, tell: Callable[[str], None]) -> int:
    from trellis_kernels.layers import DeviceLimits, device_limits
    from trellis_moe.bench.suite import precompile

    limits = DeviceLimits(options.arch, _MULTIPROCESSORS) if options.arch else device_limits("cuda")
    if limits is None:
        raise MoeValueError(
            "--compile-only: no CUDA device is visible that kernels are made for; say --arch, as sm_90a"
        )
    parts = frozenset(_parts(name, options))
    count = precompile(_suite(options, "cuda"), parts, limits, jobs=options.jobs)
    tell(f"{count} kernels are ready")
    return 0


def _parts(name: str, options: argparse.Namespace) -> tuple[str, ...]:
    from trellis_moe.bench.suite import PARTS

    return tuple(part for part in PARTS if part not in options.without) if name == "all" else (name,)


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Let a request to terminate interrupt, as a keyboard does, so that what was measured can be written."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _suite(options: argparse.Namespace, device_type: str) -> Suite:
    from trellis_moe.bench.presets import get_preset
    from trellis_moe.bench.suite import LayerRun, asked_suite, full_suite, tiny_suite

    suite = tiny_suite() if device_type == "cpu" else asked_suite() if options.asked else full_suite()
    layers, around = suite.layers, suite.around
    chosen, counts = getattr(options, "preset", None), getattr(options, "tokens", None)
    if chosen or counts:
        layers, around = (*layers, *around), ()
    if chosen:
        presets = [get_preset(text) for text in chosen]
        known = {preset: [layer for layer in layers if layer.preset == preset] for preset in presets}
        layers = tuple(layer for preset in presets for layer in known[preset] or [LayerRun(preset, _COUNTS)])
    if counts:
        if min(counts) < 1:
            raise MoeValueError(f"--tokens must be at least 1, got {min(counts)}")
        layers = _at_counts(layers, tuple(counts))
    return replace(suite, layers=layers, around=around)


def _at_counts(layers: tuple[LayerRun, ...], counts: tuple[int, ...]) -> tuple[LayerRun, ...]:
    """Each layer once, at these token counts; those that it is compared at stay compared."""
    found: dict[tuple[Any, str], LayerRun] = {}
    for layer in layers:
        known = found.get((layer.preset, layer.io_dtype))
        compared = {*layer.compared, *(known.compared if known else ())}
        opted = dict(known.opt_in if known else ()) | {
            name: (*dict(known.opt_in if known else ()).get(name, ()), *given) for name, given in layer.opt_in
        }
        found[layer.preset, layer.io_dtype] = replace(
            layer,
            tokens=tuple(count for count in counts if count not in compared),
            compared=tuple(count for count in counts if count in compared),
            opt_in=tuple((name, tuple(count for count in counts if count in given)) for name, given in opted.items()),
        )
    return tuple(found.values())


def _command(name: str, options: argparse.Namespace) -> str:
    """The command without paths of the user."""
    words = ["trellis-moe", "bench", name, "--out", "DIR", "--samples", str(options.samples)]
    words += ["--seconds", f"{options.seconds:g}"] if options.seconds != _SECONDS else []
    words += ["--device", options.device] if options.device else []
    words += ["--asked"] if options.asked else []
    for option in ("without", "preset", "tokens"):
        values = getattr(options, option, None)
        words += [f"--{option}", *map(str, values)] if values else []
    return shlex.join(words)


def _tables(options: argparse.Namespace) -> int:
    from trellis_moe.receipts.tables import update_tables

    stale = update_tables(options.root, write=not options.check)
    for path in stale:
        print(f"{'stale' if options.check else 'written'}: {path}")
    return 1 if options.check and stale else 0


def _plot(options: argparse.Namespace) -> int:
    from trellis_moe.receipts.plots import draw

    for path in draw(options.root / "docs" / "benchmarks"):
        print(path)
    return 0


def _schema(_options: argparse.Namespace) -> int:
    import json

    from trellis_moe.receipts.schema import Receipt

    print(json.dumps(Receipt.json_schema(), sort_keys=True))
    return 0


def _publish(options: argparse.Namespace) -> int:
    from trellis_moe.receipts.store import load, publish

    receipts = [(path.stem, load(path)) for path in options.receipts]
    for path in publish(receipts, options.root / "docs" / "benchmarks"):
        print(path)
    return 0
