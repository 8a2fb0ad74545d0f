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
from functools import partial
from typing import Any

import torch

from trellis_format.source import TrellisSource
from trellis_kernels.bench.layers import float64_forward, random_experts, random_source
from trellis_kernels.bench.timing import Launch, eager_samples, graph_samples
from trellis_kernels.cute import compiler
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.moe_key import MoeSmallKey, scratch_nbytes
from trellis_kernels.cute.moe_plan import plan_moe_small
from trellis_prep import PreparedExperts

__all__ = ["GEOMETRIES", "Geometry", "LayerBench", "eager_us", "graph_us", "main", "make_key"]

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
    "long": Geometry(16384, 4224, 8, 8, "mul1", "3"),
}
"""GLM-4.5-Air, Qwen3-30B-A3B at two rates, DeepSeek-V3 split over eight ranks, and one whose gate and up are one block
for each half of an H200's SMs with 256 steps each, so that the inner loop is all that it takes."""


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
    parser.add_argument(
        "--compile-only", action="store_true", help="compile into the persistent cache, measure nothing"
    )
    options = parser.parse_args(arguments)
    for name in options.geometry:
        if options.compile_only:
            for tokens in options.tokens:
                for change in options.changes:
                    compiler.compile_kernel(make_key(GEOMETRIES[name], tokens, json.loads(change)))
            continue
        bench = LayerBench(GEOMETRIES[name])
        for tokens in options.tokens:
            for change in options.changes:
                row = {"geometry": name, "tokens": tokens, "change": json.loads(change)}
                try:
                    row |= _measure(bench, tokens, json.loads(change), options.profile)
                except Exception as failure:  # noqa: BLE001  # one bad tiling must not end the table
                    row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
                print(json.dumps(row), flush=True)


def _make_source(geometry: Geometry) -> TrellisSource:
    return random_source(
        experts=geometry.experts,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        codebook=geometry.codebook,
        rates=[geometry.rate],
    )


def _make_layers(geometry: Geometry) -> list[PreparedExperts]:
    source = _make_source(geometry)
    count = max(1, -(-_LAYER_BYTES // source.code_bytes()))
    return [random_experts(source, device="cuda", seed=seed) for seed in range(count)]


def make_key(geometry: Geometry, tokens: int, change: dict[str, Any]) -> MoeSmallKey:
    """The planned key of a geometry at a capacity, with some fields changed; a tiling's change is an object itself."""
    key = plan_moe_small(
        _make_source(geometry),
        arch=arch_of_device(0).name,
        max_tokens=tokens,
        top_k=geometry.top_k,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        arithmetic=change.get("arithmetic", "exact"),
    )
    tilings = {name: replace(getattr(key, name), **change[name]) for name in ("up", "down") if name in change}
    fields = {name: value for name, value in change.items() if name not in tilings}
    return replace(key, **fields, **tilings)


class LayerBench:
    """Layers of noise of one geometry on the GPU, with inputs for each token count."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._layers = _make_layers(geometry)
        self._inputs: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._truths: dict[int, torch.Tensor] = {}

    def inputs(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """`(x, topk_ids, topk_weights)` of each launch of a graph."""
        if tokens not in self._inputs:
            generator = torch.Generator("cuda").manual_seed(tokens)
            inputs = []
            for _ in range(_LAUNCHES):
                logits = torch.randn(tokens, self.geometry.experts, device="cuda", generator=generator)
                weights, ids = torch.softmax(logits, dim=-1).topk(self.geometry.top_k)
                x = torch.randn(tokens, self.geometry.hidden, device="cuda", generator=generator).half()
                inputs.append((x, ids.contiguous(), weights.contiguous()))
            self._inputs[tokens] = inputs
        return self._inputs[tokens]

    def bind(self, key: MoeSmallKey, tokens: int) -> tuple[Callable[[int], None], torch.Tensor]:
        """A launch of the inputs of an index, and the output that all of them write."""
        from trellis_kernels.cute.moe_small import MoeSmall

        inputs = self.inputs(tokens)
        scratch = torch.full((scratch_nbytes(key, tokens),), 0xFF, dtype=torch.uint8, device="cuda")
        out = torch.full((tokens, self.geometry.hidden), float("nan"), dtype=torch.float16, device="cuda")
        bound = [MoeSmall(experts, key=key, max_tokens=tokens, scratch=scratch) for experts in self._layers]

        def launch(index: int) -> None:
            bound[index % len(bound)](*inputs[index], out)

        return launch, out

    def error(self, launch: Callable[[int], None], out: torch.Tensor) -> float:
        """Relative L2 of the first tokens of the first inputs."""
        tokens = out.shape[0]
        if tokens not in self._truths:
            part = (tensor[:_CHECKED] for tensor in self.inputs(tokens)[0])
            self._truths[tokens] = float64_forward(self._layers[0], *part)
        launch(0)
        truth = self._truths[tokens]
        return float((out[:_CHECKED].double() - truth).norm() / truth.norm())

    def active(self, tokens: int) -> float:
        """Mean number of experts that a launch reads."""
        return statistics.fmean(len(set(ids.reshape(-1).tolist())) for _, ids, _ in self.inputs(tokens))


def _measure(bench: LayerBench, tokens: int, change: dict[str, Any], profile: bool) -> dict[str, Any]:
    geometry = bench.geometry
    key = make_key(geometry, tokens, change)
    start = time.perf_counter()
    compiler.precompile([key])
    compile_seconds = time.perf_counter() - start
    launch, out = bench.bind(key, tokens)
    error = bench.error(launch, out)
    active = bench.active(tokens)
    micros = graph_us(launch)
    row = {
        "us": round(micros, 2),
        "eager_us": round(eager_us(launch), 2),
        "twps": round(active * 3 * geometry.hidden * geometry.intermediate / micros / 1e6, 3),
        "error": float(f"{error:.3g}"),
        "active": round(active, 1),
        "up": repr(key.up),
        "down": repr(key.down),
        "arithmetic": key.arithmetic,
        "columns": key.row_columns,
        "compile_s": round(compile_seconds, 1),
    }
    return row | ({"kernels_us": _kernel_us(launch)} if profile else {})


def graph_us(launch: Callable[[int], None], replays: int = _REPLAYS) -> float:
    """Median microseconds of a launch, over replays of a graph of all of them."""
    return graph_samples(_launches(launch), count=replays, least=_LAUNCHES).microseconds


def eager_us(launch: Callable[[int], None]) -> float:
    """Median microseconds of a launch from Python, queued back to back."""
    return eager_samples(_launches(launch) * 2, device=torch.device("cuda"), count=5).microseconds


def _launches(launch: Callable[[int], None]) -> list[Launch]:
    return [partial(launch, index) for index in range(_LAUNCHES)]


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
