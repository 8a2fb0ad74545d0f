"""Owns the timing of the few-token layer: `python -m trellis_kernels.bench.moe_small`.  It must not know checkpoints.

Layers of noise are larger than the L2 together and every launch of a graph has its own routes, so that weights come
from device memory as they do in a model.  Each row is checked against float64 first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trellis_kernels.bench.layers import float64_forward, random_experts, random_source
from trellis_kernels.cute import compiler
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.moe_key import MoeSmallKey, Tiling, scratch_nbytes
from trellis_kernels.cute.moe_plan import plan_moe_small
from trellis_prep import PreparedExperts

__all__ = ["GEOMETRIES", "Geometry", "main"]

_LAUNCHES = 16  # of a graph, each with its own routes
_REPLAYS = 25
_CHECKED = 4  # tokens that are compared with float64, which is slow
_LAYER_BYTES = 600 << 20  # of weights, so that a launch finds none of its own in the L2


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer: hidden and intermediate channels, experts, routes of a token, codebook and K."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    codebook: str
    rate: str


GEOMETRIES = {
    "glm": Geometry(4096, 1408, 128, 8, "mul1", "3"),
    "qwen": Geometry(2048, 768, 128, 8, "mul1", "3"),
    "qwen4": Geometry(2048, 768, 128, 8, "mcg", "4"),
    "dsv3": Geometry(7168, 256, 256, 8, "mcg", "3"),
}
"""GLM-4.5-Air, Qwen3-30B-A3B at two rates, and DeepSeek-V3 split over eight ranks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of JSON for each geometry, token count and tiling."""
    parser = argparse.ArgumentParser(prog="python -m trellis_kernels.bench.moe_small", description=__doc__)
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=list(GEOMETRIES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 32, 128])
    parser.add_argument(
        "--changes", nargs="+", default=["{}"],
        help="JSON objects of key fields to change, for example '{\"up\": {\"split\": 3}, \"row_columns\": 2}'",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="also time each kernel")
    options = parser.parse_args(arguments)
    for name in options.geometry:
        layers = _make_layers(GEOMETRIES[name])
        for tokens in options.tokens:
            for change in options.changes:
                row = {"geometry": name, "tokens": tokens, "change": json.loads(change)}
                try:
                    row |= _measure(layers, GEOMETRIES[name], tokens, json.loads(change), options.profile)
                except Exception as failure:  # noqa: BLE001  # one bad tiling must not end the table
                    row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
                print(json.dumps(row), flush=True)


def _make_layers(geometry: Geometry) -> list[PreparedExperts]:
    source = random_source(
        experts=geometry.experts,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        codebook=geometry.codebook,
        rates=[geometry.rate],
    )
    count = max(1, -(-_LAYER_BYTES // source.code_bytes()))
    return [random_experts(source, device="cuda", seed=seed) for seed in range(count)]


def _changed(key: MoeSmallKey, change: dict[str, Any]) -> MoeSmallKey:
    tilings = {name: replace(getattr(key, name), **change[name]) for name in ("up", "down") if name in change}
    fields = {name: value for name, value in change.items() if name not in tilings}
    return replace(key, **fields, **tilings)


def _measure(
    layers: list[PreparedExperts], geometry: Geometry, tokens: int, change: dict[str, Any], profile: bool
) -> dict[str, Any]:
    from trellis_kernels.cute.moe_small import moe_small

    key = plan_moe_small(
        layers[0].source,
        arch=arch_of_device(0).name,
        max_tokens=tokens,
        top_k=geometry.top_k,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
    )
    key = _changed(key, change)
    start = time.perf_counter()
    compiler.precompile([key])
    compile_seconds = time.perf_counter() - start
    generator = torch.Generator("cuda").manual_seed(tokens)
    scratch = torch.full((scratch_nbytes(key, tokens),), 0xFF, dtype=torch.uint8, device="cuda")
    inputs = []
    for _ in range(_LAUNCHES):
        logits = torch.randn(tokens, geometry.experts, device="cuda", generator=generator)
        weights, ids = torch.softmax(logits, dim=-1).topk(geometry.top_k)
        x = torch.randn(tokens, geometry.hidden, device="cuda", generator=generator).half()
        inputs.append((x, ids.contiguous(), weights.contiguous()))
    out = torch.full((tokens, geometry.hidden), float("nan"), dtype=torch.float16, device="cuda")

    def launch(index: int) -> None:
        x, ids, weights = inputs[index]
        experts = layers[index % len(layers)]
        moe_small(x, experts, ids, weights, key=key, max_tokens=tokens, scratch=scratch, out=out)

    launch(0)
    truth = float64_forward(layers[0], *(tensor[:_CHECKED] for tensor in inputs[0]))
    error = float((out[:_CHECKED].double() - truth).norm() / truth.norm())
    active = statistics.mean(ids.unique().numel() for _, ids, _ in inputs)
    weights_read = active * 3 * geometry.hidden * geometry.intermediate
    graph_us = _graph_us(launch)
    row = {
        "us": round(graph_us, 2),
        "eager_us": round(_eager_us(launch), 2),
        "twps": round(weights_read / graph_us / 1e6, 3),
        "error": float(f"{error:.3g}"),
        "active": round(active, 1),
        "up": [key.up.blocks, key.up.slices, key.up.split, key.up.stages, key.up.resident],
        "down": [key.down.blocks, key.down.slices, key.down.split, key.down.stages, key.down.resident],
        "columns": key.row_columns,
        "compile_s": round(compile_seconds, 1),
    }
    return row | ({"kernels_us": _kernel_us(launch)} if profile else {})


def _graph_us(launch: Callable[[int], None]) -> float:
    """Median microseconds of a launch, over replays of a graph of all of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(_LAUNCHES):
            launch(index)
    samples = []
    for turn in range(_REPLAYS + 3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        if turn >= 3:
            samples.append(first.elapsed_time(last) * 1e3 / _LAUNCHES)
    return statistics.median(samples)


def _eager_us(launch: Callable[[int], None]) -> float:
    """Median microseconds of a launch from Python, queued back to back."""
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2):
            for index in range(_LAUNCHES):
                launch(index)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / (2 * _LAUNCHES))
    return statistics.median(samples)


def _kernel_us(launch: Callable[[int], None]) -> dict[str, float]:
    """Mean microseconds of each kernel by the profiler; launches overlap, so the sum may exceed the whole."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for index in range(_LAUNCHES):
            launch(index)
        torch.cuda.synchronize()
    means = {}
    for event in trace.key_averages():
        for name in ("route", "up", "down"):
            if f"{name}_kernel" in event.key:
                means[name] = round(event.device_time_total / event.count, 2)
    return means


if __name__ == "__main__":
    main()
