"""Owns the search for the fastest tilings of the few-token layer: `python -m trellis_kernels.bench.tune`.

It must not be needed at run time: what it prints is copied into `cute.moe_tilings`.  The blocks of up and down share
the SMs while up drains, so pairs are measured and not the two apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from typing import Any

import torch

from trellis_format.extent import BLOCK
from trellis_kernels.bench.moe_small import GEOMETRIES, LayerBench, eager_us, graph_us, make_key
from trellis_kernels.cute import compiler
from trellis_kernels.cute.gemm_share import STEP_CHANNELS
from trellis_kernels.cute.moe_key import MoeSmallKey, Tiling
from trellis_kernels.errors import KernelError

__all__ = ["main", "pairs"]

_REPLAYS = 8
_RING = Tiling(slices=2, stages=3, resident=1, in_shared=True)
_FREE = Tiling(resident=1)  # steps in registers, as many as the compiler likes
_BOUND = 1e-3  # relative L2 that every candidate must meet

Point = tuple[str, str, int]
"""Geometry, arithmetic, tokens."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of JSON for every candidate, and last the best of each point, also launched from Python."""
    parser = argparse.ArgumentParser(prog="python -m trellis_kernels.bench.tune", description=__doc__)
    parser.add_argument("points", nargs="+", metavar="GEOMETRY:ARITHMETIC:TOKENS", help="for example glm:bytes:8")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no measurement after that long")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    points = [(name, arithmetic, int(tokens)) for name, arithmetic, tokens in (p.split(":") for p in options.points)]
    candidates = {point: _candidates(point) for point in points}
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, [key for keys in candidates.values() for key in keys]))
    benches: dict[str, LayerBench] = {}
    for point, keys in candidates.items():
        bench = benches.setdefault(point[0], LayerBench(GEOMETRIES[point[0]]))
        found = _measure_all(bench, point, keys, deadline)
        if found:
            best = min(found, key=lambda key: found[key])
            launch, out = bench.bind(best, point[2])
            row = {"best": point, "us": round(graph_us(launch), 2), "eager_us": round(eager_us(launch), 2)}
            row["error"] = float(f"{bench.error(launch, out):.3g}")
            print(json.dumps(row | _described(best)), flush=True)


def pairs(key: MoeSmallKey, experts: int, tokens: int, multiprocessors: int) -> list[tuple[Tiling, Tiling]]:
    """Tilings of up and down that are worth a measurement together, for a layer of some experts.

    Splits make one or two waves of two thread blocks an SM from the experts that a launch is expected to read.
    """
    hit = 1 - (1 - min(key.top_k / experts, 1.0)) ** tokens
    units = experts * hit * (key.width // BLOCK)
    most = max(key.padded_hidden // STEP_CHANNELS // 6, 1)  # three steps for each of two slices
    split = min(max(round(2 * multiprocessors / units), 1), most)
    if key.direct:
        ups = [_RING, replace(_RING, stages=4), _FREE]
        downs = [
            replace(tiling, slices=slices, blocks=blocks)
            for tiling in (_RING, _FREE)
            for slices, blocks in ((4, 1), (2, 1), (4, 2), (2, 2))
        ]
        return [(replace(up, split=split), down) for up in ups for down in downs]
    narrow, wide = replace(_RING, slices=1), replace(_RING, slices=1, blocks=2)
    small = [
        (_RING, _RING),
        (narrow, _RING),
        (narrow, wide),
        (_RING, wide),
        (replace(_RING, stages=2), replace(_RING, stages=2)),
        (replace(_RING, stages=2, resident=3), replace(_RING, stages=2, resident=6)),
        (replace(narrow, stages=2, resident=5), replace(_RING, stages=2, resident=5)),
        (_FREE, _RING),
        (_FREE, _FREE),
    ]
    splits = sorted({split, min(3 * split, most)}) if units < 3 * multiprocessors else [split]
    return [(replace(up, split=split), down) for split in splits for up, down in small]


def _planned(point: Point) -> MoeSmallKey:
    name, arithmetic, tokens = point
    return make_key(GEOMETRIES[name], tokens, {"arithmetic": arithmetic})


def _candidates(point: Point) -> list[MoeSmallKey]:
    planned = _planned(point)
    keys = [planned]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for up, down in pairs(planned, GEOMETRIES[point[0]].experts, point[2], processors):
        try:
            keys.append(replace(planned, up=up, down=down))
        except KernelError:
            continue  # a block count that the tiling does not divide
    return list(dict.fromkeys(keys))


def _compile(key: MoeSmallKey) -> None:
    """Into the persistent cache, where the measuring process finds it."""
    compiler.compile_kernel(key)


def _measure_all(
    bench: LayerBench, point: Point, keys: Iterable[MoeSmallKey], deadline: float
) -> dict[MoeSmallKey, float]:
    found = {}
    for key in keys:
        if time.monotonic() > deadline:
            break
        row: dict[str, Any] = {"point": point} | _described(key)
        try:
            launch, out = bench.bind(key, point[2])
            error = bench.error(launch, out)
            micros = graph_us(launch, _REPLAYS)
            row |= {"us": round(micros, 2), "error": float(f"{error:.3g}")}
            if error <= _BOUND:
                found[key] = row["us"]
        except Exception as failure:  # noqa: BLE001  # one bad candidate must not end the search
            row["failure"] = f"{type(failure).__name__}: {failure}"[:200]
        print(json.dumps(row), flush=True)
    return found


def _described(key: MoeSmallKey) -> dict[str, Any]:
    return {"up": list(astuple(key.up)), "down": list(astuple(key.down)), "columns": key.row_columns}


if __name__ == "__main__":
    main()
