"""Owns the measurement of the ops around the GEMM on one GPU.  It must not know layers.

`python -m trellis_kernels.bench.ops [--json FILE]` prints a row for each op: the median time of a launch inside a CUDA
graph, over buffers that take turns and are together larger than the second-level cache, the bytes that it moves, and
their rate against a device copy measured beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import TILE, Rate
from trellis_kernels import decode, pack_routes, reduce_routes, rotate_input, rotate_output
from trellis_kernels.arguments import FULL_TABLE_CODEBOOK, FULL_TABLE_RATE
from trellis_kernels.ops import implementation
from trellis_kernels.routes import empty_routes

__all__ = ["OpRow", "main", "measure"]

_DEVICE = "cuda"
_SAMPLES = 15
_HIDDEN = 7168

Launch = Callable[[], object]


@dataclass(frozen=True)
class OpRow:
    """One measurement.

    Attributes:
        op: what was launched.
        case: on what.
        microseconds: median time of a launch.
        spread: fastest and slowest sample, microseconds.
        moved_bytes: bytes that a launch must read and write.
        weights: weights that a launch decodes, or 0.
    """

    op: str
    case: str
    microseconds: float
    spread: tuple[float, float]
    moved_bytes: int
    weights: int = 0

    @property
    def bytes_per_second(self) -> float:
        """Rate of the bytes moved."""
        return self.moved_bytes / self.microseconds * 1e6


def _event() -> Any:  # torch leaves the class untyped
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch


def measure(op: str, case: str, launches: Sequence[Launch], moved_bytes: int, weights: int = 0) -> OpRow:
    """Time launches that take turns, inside one graph.

    Args:
        op: name.
        case: what it is launched on.
        launches: the same launch on different buffers.
        moved_bytes: bytes that one launch must move.
        weights: weights that one launch decodes.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 16 // len(launches))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    samples = []
    for index in range(_SAMPLES + 3):
        start, end = (_event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 3:
            samples.append(start.elapsed_time(end) * 1e3 / (rounds * len(launches)))
    return OpRow(op, case, statistics.median(samples), (min(samples), max(samples)), moved_bytes, weights)


def _copy_rows() -> list[OpRow]:
    # a kernel, because a copy inside a graph is a memory node, which moves a third less
    source, target = (torch.ones(1 << 28, device=_DEVICE) for _ in range(2))
    return [measure("copy", "1 GiB", [lambda: torch.neg(source, out=target)], 8 * source.numel())]


def _decode_rows() -> list[OpRow]:
    rows = []
    k, n = 16384, 32768
    out = torch.empty(k, n, dtype=torch.float16, device=_DEVICE)
    for name, codebook in CODEBOOKS.items():
        for rate in (Rate.of(bits) for bits in (2, 3, 4, 5, 6)):
            if rate not in codebook.legal_rates:
                continue
            shape = (k // TILE, n // TILE, rate.tile_words16)
            codes = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=_DEVICE)

            def launch(codes: torch.Tensor = codes, name: str = name, rate: Rate = rate) -> object:
                return decode(codes, codebook=name, rate=rate, out=out)

            moved = codes.numel() * 2 + out.numel() * 2
            rows.append(measure("decode", f"{name} K={rate} float16", [launch], moved, k * n))
    codes = torch.randint(-(2**15), 2**15, (k // TILE, n // TILE, 32), dtype=torch.int16, device=_DEVICE)
    full = partial(decode, codes, codebook=FULL_TABLE_CODEBOOK, rate=FULL_TABLE_RATE, table="full", out=out)
    case = f"{FULL_TABLE_CODEBOOK} K={FULL_TABLE_RATE} float16, full table"
    rows.append(measure("decode", case, [full], codes.numel() * 2 + out.numel() * 2, k * n))
    return rows


def _ceiling_rows() -> list[OpRow]:
    from trellis_kernels.cute.ceiling import launch_ceiling  # needs the DSL, which the table does without a GPU

    rows = []
    scratch = torch.empty(4, dtype=torch.int32, device=_DEVICE)
    for name in ("3inst", "mcg", "mul1"):
        for bits in (2, 3, 4, 5, 8):
            rate = Rate.of(bits)
            tiles = (1 << 28) // rate.tile_bytes
            codes = torch.randint(-(2**15), 2**15, (tiles, rate.tile_words16), dtype=torch.int16, device=_DEVICE)
            for streams in (True, False):

                def launch(
                    codes: torch.Tensor = codes, name: str = name, rate: Rate = rate, streams: bool = streams
                ) -> int:
                    return launch_ceiling(codes, codebook=name, rate=rate, streams=streams, scratch=scratch)

                moved = codes.numel() * 2 if streams else 0
                case = f"{name} K={rate} {'from memory' if streams else 'from registers'}"
                rows.append(measure("ceiling", case, [launch], moved, launch()))
    return rows


def _rotate_rows() -> list[OpRow]:
    rows = []
    scales = torch.randn(1, _HIDDEN, device=_DEVICE).half()
    for tokens in (8, 4096):
        for block in (128, 512):
            for dtype in (torch.float16, torch.bfloat16):
                pairs = [
                    (torch.randn(tokens, _HIDDEN, device=_DEVICE).to(dtype), torch.empty(tokens, _HIDDEN).half().cuda())
                    for _ in range(4)
                ]
                launches = [
                    (lambda x=x, out=out, block=block: rotate_input(x, scales, block=block, out=out))
                    for x, out in pairs
                ]
                case = f"{tokens} x {_HIDDEN} {dtype} H{block}"
                rows.append(measure("rotate_input", case, launches, 4 * tokens * _HIDDEN))
        wide = [torch.randn(tokens, _HIDDEN, device=_DEVICE) for _ in range(4)]
        outputs = [(lambda y=y: rotate_output(y, scales, out=y)) for y in wide]
        rows.append(measure("rotate_output", f"{tokens} x {_HIDDEN} float32", outputs, 8 * tokens * _HIDDEN))
    return rows


def _pack_rows() -> list[OpRow]:
    rows = []
    for tokens, top_k, experts, block_rows in ((4096, 16, 896, 64), (16, 8, 128, 16), (128, 8, 256, 16)):
        all_ids = [
            torch.rand(tokens, experts, device=_DEVICE).topk(top_k, dim=1).indices.to(torch.int32) for _ in range(4)
        ]
        arena = empty_routes(tokens * top_k, experts, block_rows, all_ids[0].device)
        for stable in (True, False):
            launches = [
                (
                    lambda ids=ids, stable=stable, experts=experts, block_rows=block_rows, arena=arena: pack_routes(
                        ids, num_experts=experts, block_rows=block_rows, stable=stable, out=arena
                    )
                )
                for ids in all_ids
            ]
            order = "stable" if stable else "unordered"
            case = f"{tokens * top_k} routes, {experts} experts, blocks of {block_rows}, {order}"
            rows.append(measure("pack_routes", case, launches, 4 * (2 * tokens * top_k)))
    return rows


def _reduce_rows() -> list[OpRow]:
    rows = []
    for tokens in (8, 1024):
        cases = [
            (torch.randn(tokens * 8, _HIDDEN, device=_DEVICE), torch.rand(tokens, 8, device=_DEVICE)) for _ in range(3)
        ]
        out = torch.empty(tokens, _HIDDEN, dtype=torch.bfloat16, device=_DEVICE)
        accumulator = torch.empty(tokens, _HIDDEN, device=_DEVICE)
        for name, given in (("ordered", None), ("atomic", accumulator)):
            launches = [
                (lambda r=r, w=w, given=given, out=out: reduce_routes(r, w, accumulator=given, out=out))
                for r, w in cases
            ]
            moved = tokens * _HIDDEN * (8 * 4 + 2)
            rows.append(measure("reduce_routes", f"{tokens} x 8 x {_HIDDEN} bfloat16, {name}", launches, moved))
    return rows


_GROUPS: dict[str, Callable[[], list[OpRow]]] = {
    "rotate": _rotate_rows,
    "pack": _pack_rows,
    "reduce": _reduce_rows,
    "decode": _decode_rows,
    "ceiling": _ceiling_rows,
}


def _check_decode() -> None:
    """Kernels are measured only where they are exact."""
    codes = torch.randint(-(2**15), 2**15, (2, 5, 48), dtype=torch.int16, device=_DEVICE)
    found, wanted = (torch.empty(32, 80, dtype=torch.float16, device=_DEVICE) for _ in range(2))
    decode(codes, codebook="mcg", rate=Rate.of(3), out=found)
    implementation("decode", "cpu")(codes, codebook="mcg", rate=Rate.of(3), out=wanted)
    if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
        raise SystemExit("decode differs from the torch backend")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON if asked for.

    Args:
        argv: arguments after the program's name; None means those of this process.

    Returns:
        0; or 2 without a CUDA device.
    """
    parser = argparse.ArgumentParser(prog="trellis_kernels.bench.ops")
    parser.add_argument("--group", action="append", choices=tuple(_GROUPS), help="what to measure; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    _check_decode()
    rows = [*_copy_rows(), *(row for group in options.group or _GROUPS for row in _GROUPS[group]())]
    copy = rows[0].bytes_per_second
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e12:.2f} TB/s")
    for row in rows:
        share = f"{row.bytes_per_second / copy:6.1%}"
        speed = f"{row.weights / row.microseconds / 1e6:6.2f} T weights/s" if row.weights else ""
        print(f"{row.op:14} {row.case:58} {row.microseconds:9.2f} us  {share} of copy  {speed}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
