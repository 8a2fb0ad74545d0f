"""Owns the measurement of trellis-format's speed on this machine: open, validate, decode, convert.

It must not judge: it prints one JSON object for each measurement, with the bound that it is to be held to.

    python tests/benchmarks/format_speed.py [open validate decode convert]

Bounds are for one core (two for `open`) that does nothing else; `seconds` is wall time, `cpu_seconds` what the process
used, so that a busy machine shows.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trellis_format.checkpoint import open_checkpoint
from trellis_format.codebooks import CODEBOOKS
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.rates import Rate
from trellis_format.synth import SynthSpec, synth_checkpoint
from trellis_format.tiles import decode_inner
from trellis_format.validate import validate_checkpoint

__all__ = ["main"]


@contextmanager
def timed(row: dict[str, Any]) -> Iterator[None]:
    """Put wall and processor seconds of a block into a row."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    row["seconds"] = round(time.perf_counter() - wall, 3)
    row["cpu_seconds"] = round(time.process_time() - cpu, 3)


def report(row: dict[str, Any]) -> None:
    """Print a row with the machine."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    print(
        json.dumps(row | {"machine": platform.machine(), "processor": _processor(), "versions": versions}), flush=True
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def measure_open(folder: Path) -> None:
    """64 shards with 60,000 tensors: below 2 s and 300 MiB."""
    sizes = {"hidden": 128, "intermediate": 128, "experts": 250, "layers": 20}
    synth_checkpoint(folder / "open", SynthSpec(**sizes, rates=(Rate.of(1),), shards=64, sparse=True))
    # A process of its own, so that its peak memory is that of opening.
    command = [sys.executable, __file__, "--open", str(folder / "open")]
    report(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def open_once(path: str) -> None:
    """What `measure_open` runs."""
    row: dict[str, Any] = {"measure": "open", "bound_seconds": 2.0, "bound_mib": 300}
    with timed(row):
        checkpoint = open_checkpoint(path)
    row |= {"shards": len(checkpoint.readers), "tensors": len(checkpoint.tensors)}
    row["peak_mib"] = _peak_mib()
    print(json.dumps(row))


def _peak_mib() -> int:
    """Most memory of this program; what getrusage tells is inherited from the process that started it."""
    status = Path("/proc/self/status").read_text()
    return round(int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024)


def measure_validate(folder: Path) -> None:
    """100 shards of 8 GB, headers alone: below 5 s."""
    sizes = {"hidden": 7168, "intermediate": 4096, "experts": 256, "layers": 70}
    spec = SynthSpec(**sizes, rates=(Rate.of(4),), naming="deepseek_v3", shards=100, sparse=True)
    nbytes = synth_checkpoint(folder / "validate", spec)
    row: dict[str, Any] = {"measure": "validate", "bound_seconds": 5.0, "bytes": nbytes}
    with timed(row):
        row["tensors"] = validate_checkpoint(folder / "validate").checked.tensors
    report(row)


def measure_decode(_: Path) -> None:
    """Numpy decode of one tensor: at least 20 million weights/s per core."""
    rng = np.random.default_rng(0)
    for codebook in CODEBOOKS.values():
        for rate in codebook.legal_rates:
            tiles = rng.integers(-(2**15), 2**15, (128, 256, rate.tile_words16), dtype=np.int16)
            decode_inner(tiles[:1], codebook, rate)
            row: dict[str, Any] = {"measure": "decode", "codebook": codebook.name, "bits": rate.bits}
            with timed(row):
                weights = decode_inner(tiles, codebook, rate).size
            row |= {
                "mweights_per_second": round(weights / row["cpu_seconds"] / 1e6, 1),
                "bound_mweights_per_second": 20,
            }
            report(row)


def measure_convert(folder: Path) -> None:
    """Conversion there and back: at least 300 MB/s per core, where the disk allows it."""
    sizes = {"hidden": 2048, "intermediate": 1024, "experts": 128, "layers": 2}
    synth_checkpoint(folder / "exl3", SynthSpec(**sizes, rates=(Rate.of(4),), codebook="mcg"))
    ways = [("exl3", "exl3-v1"), ("exl3", "native"), ("exl3-v1", "exl3"), ("native", "exl3"), ("exl3", "exl3")]
    for first, target in ways:
        out = folder / target if not (folder / target).exists() else folder / "again"
        row: dict[str, Any] = {"measure": "convert", "from": first, "to": target}
        with closing(open_source(folder / first)) as source, timed(row):
            nbytes = convert(source, out, target).nbytes
        speeds = {f"mb_per_{name}": round(nbytes / row[name] / 1e6) for name in ("seconds", "cpu_seconds")}
        report(row | {"bytes": nbytes, "bound_mb_per_seconds": 300, **speeds})
        shutil.rmtree(folder / "again", ignore_errors=True)


MEASURES: dict[str, Callable[[Path], None]] = {
    "open": measure_open,
    "validate": measure_validate,
    "decode": measure_decode,
    "convert": measure_convert,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the measurements that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measures", nargs="*", help=f"of {', '.join(MEASURES)} (default: all)")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.open:
        open_once(options.open)
        return 0
    for name in options.measures or MEASURES:
        with tempfile.TemporaryDirectory() as folder:
            MEASURES[name](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
