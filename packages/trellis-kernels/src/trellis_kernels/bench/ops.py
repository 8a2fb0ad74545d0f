"""Owns the measurement of the ops around the GEMM on one GPU.  It must not know layers.

`python -m trellis_kernels.bench.ops [--json FILE]` prints a row for each op: the median time of a launch inside a CUDA
graph, over buffers that take turns and are together larger than the second-level cache, the bytes that it moves, their
rate against a device copy measured beside it, and the distance of its output from the reference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from trellis_format.rates import Rate
from trellis_kernels.bench.op_cases import GROUPS, OpCase, OpSizes, cases
from trellis_kernels.bench.timing import Launch, Samples, eager_samples, graph_samples

__all__ = ["CEILING_CODEBOOKS", "OpRow", "ceiling_rows", "copy_row", "main", "measure"]

CEILING_CODEBOOKS = ("3inst", "mcg", "mul1")
"""Codebooks of arithmetic alone, which have a decode ceiling."""

_SAMPLES = 15
_CEILING_RATES = ("2", "3", "4", "5", "8")
_CEILING_BYTES = 1 << 28


@dataclass(frozen=True)
class OpRow:
    """One measurement.

    Attributes:
        op: what was launched.
        case: on what.
        samples: times of a launch.
        moved_bytes: bytes that a launch must read and write.
        weights: weights that a launch decodes, or 0.
        error: distance of the timed outputs from the reference; None for a ceiling, which has no output.
        bound: most that it may be.
    """

    op: str
    case: str
    samples: Samples
    moved_bytes: int
    weights: int = 0
    error: float | None = None
    bound: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Rate of the bytes moved."""
        return self.moved_bytes / self.samples.median * 1e9

    @property
    def weights_per_second(self) -> float:
        """Rate of the weights decoded."""
        return self.weights / self.samples.median * 1e9


def measure(case: OpCase, device: torch.device, *, count: int = _SAMPLES) -> OpRow:
    """Time the launches of a case, on a GPU inside one graph, and check what they wrote.

    Args:
        case: what to launch.
        device: where.
        count: samples.
    """
    samples = _samples(case.launches, device, count)
    return OpRow(case.op, case.case, samples, case.moved_bytes, case.weights, case.error(), case.bound)


def copy_row(device: torch.device, *, nbytes: int = 1 << 30, count: int = _SAMPLES) -> OpRow:
    """Time a kernel that reads and writes once: a copy inside a graph is a memory node, which moves a third less.

    Args:
        device: where.
        nbytes: bytes read, and as many written.
        count: samples.
    """
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    samples = _samples([partial(torch.neg, source, out=target)], device, count)
    error = float((target + source).abs().max())
    return OpRow("copy", f"{nbytes / 2**20:g} MiB", samples, 8 * source.numel(), 0, error)


def ceiling_rows(
    device: torch.device,
    *,
    codebooks: Sequence[str] = CEILING_CODEBOOKS,
    rates: Sequence[str] = _CEILING_RATES,
    sources: Sequence[bool] = (True, False),
    count: int = _SAMPLES,
) -> Iterator[OpRow]:
    """Time the kernels that decode and keep nothing; needs a GPU.

    Args:
        device: where.
        codebooks: names, of `CEILING_CODEBOOKS`.
        rates: K; those that are not legal for a codebook are left out.
        sources: whether tiles come from memory (True) or from registers.
        count: samples.
    """
    from trellis_format.codebooks import get_codebook
    from trellis_kernels.cute.ceiling import launch_ceiling  # needs the DSL, which the table does without a GPU

    scratch = torch.empty(4, dtype=torch.int32, device=device)
    for name in codebooks:
        for rate in (Rate.of(text) for text in rates):
            if rate not in get_codebook(name).legal_rates:
                continue
            tiles = _CEILING_BYTES // rate.tile_bytes
            codes = torch.randint(-(2**15), 2**15, (tiles, rate.tile_words16), dtype=torch.int16, device=device)
            for streams in sources:
                launch = partial(launch_ceiling, codes, codebook=name, rate=rate, streams=streams, scratch=scratch)
                case = f"{name} K={rate} {'from memory' if streams else 'from registers'}"
                moved = codes.numel() * 2 if streams else 0
                yield OpRow("ceiling", case, _samples([launch], device, count), moved, launch())


def _samples(launches: Sequence[Launch], device: torch.device, count: int) -> Samples:
    if device.type != "cuda":
        return eager_samples(launches, device=device, count=count)
    return graph_samples(launches, count=count)


def _rows(group: str, device: torch.device) -> Iterator[OpRow]:
    if group == "ceiling":
        yield from ceiling_rows(device)
        return
    for case in cases(group, OpSizes(), device):
        row = measure(case, device)
        if row.error is None or not row.error <= row.bound:
            raise SystemExit(f"{row.op} {row.case}: error {row.error}, bound {row.bound}; not a measurement")
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON if asked for.

    Args:
        argv: arguments after the program's name; None means those of this process.

    Returns:
        0; or 2 without a CUDA device.
    """
    groups = (*GROUPS, "ceiling")
    parser = argparse.ArgumentParser(prog="trellis_kernels.bench.ops")
    parser.add_argument("--group", action="append", choices=groups, help="what to measure; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    rows = [copy_row(device), *(row for group in options.group or groups for row in _rows(group, device))]
    copy = rows[0].bytes_per_second
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e12:.2f} TB/s")
    for row in rows:
        share = f"{row.bytes_per_second / copy:6.1%}"
        speed = f"{row.weights_per_second / 1e12:6.2f} T weights/s" if row.weights else ""
        error = "" if row.error is None else f"error {row.error:.1e}"
        print(f"{row.op:14} {row.case:58} {row.samples.microseconds:9.2f} us  {share} of copy  {speed} {error}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
