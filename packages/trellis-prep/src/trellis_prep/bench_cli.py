"""Owns the subcommand `bench`: its arguments, and its report as text and as JSON.  It must not know how to measure."""

from __future__ import annotations

import argparse
import contextlib
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch

from trellis_format.layer_source import open_layer_source
from trellis_format.rates import Rate
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.version import version
from trellis_prep.bench import PreparationMeasurement, make_layer, measure_preparation
from trellis_prep.devices import resolve_device
from trellis_prep.staging import MIB, TrellisStaging
from trellis_prep.survey import rank_share

__all__ = ["BENCH_SCHEMA", "add_bench", "report_json", "run_bench", "write_bench_text"]

BENCH_SCHEMA = "trellis-prep/bench/1"
"""Schema and version of the JSON document."""


def add_bench(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    command = commands.add_parser(
        "bench",
        help="measure preparation against a plain pinned copy of the same bytes",
        description="Prepare one layer over and over from the page cache, in turn with plain copies of as many bytes "
        "from one page-locked buffer; then hold --held preparations at a time and say what memory took beyond them.",
    )
    command.add_argument("--checkpoint", metavar="DIR", help="measure a layer of it; default: one of random codes")
    command.add_argument("--layer", type=int, default=0, metavar="N", help="layer of the checkpoint; default: 0")
    command.add_argument("--folder", metavar="DIR", help="where to write random codes; default: a temporary folder")
    for name, size in (("hidden", 4096), ("intermediate", 1408), ("experts", 128)):
        command.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"of random codes; default: {size}")
    command.add_argument("--rate", type=float, default=4, metavar="K", help="of random codes; default: 4")
    command.add_argument("--sparse", action="store_true", help="codes of zeros that take no room on disk")
    command.add_argument("--tp-size", type=int, default=1, metavar="W", help="ranks that share the intermediate axis")
    command.add_argument("--tp-rank", type=int, default=0, metavar="R", help="the rank to prepare for")
    command.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: cpu")
    command.add_argument(
        "--max-bytes", type=int, nargs="+", default=[64 * MIB, 16 * MIB], metavar="N", help="bounds to measure"
    )
    command.add_argument("--readers", type=int, metavar="N", help="threads that fill slots; default: chosen by cores")
    command.add_argument("--repeats", type=int, default=7, metavar="N", help="samples of each; default: 7")
    command.add_argument("--held", type=int, default=1, metavar="N", help="preparations to hold at a time; default: 1")
    command.add_argument("--json", action="store_true", help="write JSON, and nothing else, to stdout")


def run_bench(options: argparse.Namespace) -> list[PreparationMeasurement]:
    """Measure what the arguments say.

    Raises:
        PrepError, FormatError: as `measure_preparation`.
    """
    device = resolve_device(options.device)
    bounds = [TrellisStaging(max_bytes=nbytes, readers=options.readers) for nbytes in options.max_bytes]
    with _layer(options) as (source, weights):
        extent = rank_share(source, options.tp_rank, options.tp_size) if options.tp_size > 1 else None
        return [
            measure_preparation(
                source,
                weights,
                device=device,
                staging=staging,
                extent=extent,
                repeats=options.repeats,
                layers=options.held,
            )
            for staging in bounds
        ]


def report_json(measurements: Sequence[PreparationMeasurement]) -> dict[str, Any]:
    """The document of `--json`: machine, versions, raw samples in ns, and what follows from them."""
    rows = [
        asdict(it)
        | {
            "gb_per_second": it.gb_per_second,
            "copy_gb_per_second": it.copy_gb_per_second,
            "share_of_copy": it.share_of_copy,
        }
        for it in measurements
    ]
    on_gpu = bool(measurements) and measurements[0].device.startswith("cuda")
    return {
        "schema": BENCH_SCHEMA,
        "trellis_prep": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(measurements[0].device) if on_gpu else None,
        "measurements": rows,
    }


def write_bench_text(measurements: Sequence[PreparationMeasurement], stream: TextIO) -> None:
    """Write measurements as text."""
    for it in measurements:
        stream.write(
            f"{it.nbytes:,} bytes to {it.device}, bound {it.bound_bytes:,} bytes ({it.slots} slots of "
            f"{it.slot_bytes:,}), {_fillers(it)}:\n"
            f"  prepared in {median(it.samples_ns) / 1e6:.2f} ms, {it.gb_per_second:.2f} GB/s; plain pinned copy "
            f"{median(it.copy_samples_ns) / 1e6:.2f} ms, {it.copy_gb_per_second:.2f} GB/s; share {it.share_of_copy:.1%}"
            f" (medians of {len(it.samples_ns)}); with a buffer of its own {median(it.alone_samples_ns) / 1e6:.2f} ms\n"
            f"  holding {it.layers}: {it.final_bytes:,} bytes; beyond them host {_bytes(it.peak_host_bytes)}, device "
            f"{_bytes(it.peak_device_bytes)}; codes {'exact' if it.is_exact else 'WRONG'}\n"
        )


def _fillers(it: PreparationMeasurement) -> str:
    if it.workers:
        return "the kernel's workers"
    return f"{it.pollers} pollers" if it.pollers else f"{it.readers} readers"


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,} bytes"


@contextlib.contextmanager
def _layer(options: argparse.Namespace) -> Iterator[tuple[TrellisSource, TrellisWeights]]:
    if options.checkpoint is not None:
        yield open_layer_source(options.checkpoint, options.layer)
        return
    with tempfile.TemporaryDirectory(prefix="trellis-prep-", dir=options.folder) as folder:
        yield make_layer(
            Path(folder) / "layer",
            hidden=options.hidden,
            intermediate=options.intermediate,
            experts=options.experts,
            rate=Rate.of(options.rate),
            sparse=options.sparse,
        )
