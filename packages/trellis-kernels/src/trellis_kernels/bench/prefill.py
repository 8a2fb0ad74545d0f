"""Owns the timing of a layer for many tokens: `python -m trellis_kernels.bench.prefill`.  It must not know checkpoints.

A layer of noise is launched in a graph on uniformly random routes; its first tokens are checked against float64 first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trellis_kernels.bench.layers import float64_forward, random_experts, random_source
from trellis_kernels.bench.moe_small import GEOMETRIES, Geometry
from trellis_kernels.bench.timing import graph_samples
from trellis_kernels.cute.prefill_key import ENGINES
from trellis_kernels.cute.prefill_plan import PrefillPlan, plan_prefill

__all__ = ["kernel_part", "main", "make_plan"]

_REPLAYS = 10
_CHECKED = 4  # tokens that are compared with float64, which is slow
_PARTS = {"prefill_image": "image", "join": "gate_up", "down": "down", "prefill_reduce": "sum", "schedule": "blocks"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of JSON for each geometry and token count."""
    parser = argparse.ArgumentParser(prog="python -m trellis_kernels.bench.prefill", description=__doc__)
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=["glm", "qwen", "dsv3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 1024, 4096, 8192])
    parser.add_argument("--joint", action="store_true", help="gate and up share their input vector")
    parser.add_argument("--bound", type=int, default=None, metavar="BYTES", help="most bytes of scratch")
    parser.add_argument("--engine", choices=ENGINES, default=None, help="what multiplies (default: the planned)")
    options = parser.parse_args(arguments)
    for name in options.geometry:
        for tokens in options.tokens:
            plan = make_plan(GEOMETRIES[name], tokens, joint=options.joint, bound=options.bound, engine=options.engine)
            row = {"geometry": name, "joint": options.joint, "engines": plan.engines}
            print(json.dumps(row | _measure(plan)), flush=True)


def make_plan(
    geometry: Geometry, tokens: int, *, joint: bool = False, bound: int | None = None, engine: str | None = None
) -> PrefillPlan:
    """The plan of a geometry at a capacity, fp16 in and out.

    Args:
        geometry: of the layer.
        tokens: most tokens of a launch.
        joint: whether gate and up share their input vector.
        bound: bytes of scratch, None for no bound.
        engine: what multiplies at any number of rows, one of `ENGINES`; None is as planned.
    """
    source = random_source(
        experts=geometry.experts,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        codebook=geometry.codebook,
        rates=[geometry.rate],
        joint=joint,
    )
    plan = plan_prefill(source, arch="sm_90a", max_tokens=tokens, top_k=geometry.top_k, scratch_bound=bound)
    return plan if engine is None else replace(plan, engine=engine)


def kernel_part(name: str) -> str | None:
    """The part of a layer that a kernel of that mangled name does; None for one that is not of a layer."""
    return next((part for text, part in _PARTS.items() if text in name), None)


def _measure(plan: PrefillPlan) -> dict[str, Any]:
    from trellis_kernels.cute import compiler
    from trellis_kernels.cute.prefill_layer import PrefillLayer

    source = random_source(
        experts=plan.num_experts,
        hidden=plan.hidden,
        intermediate=plan.width,
        codebook=plan.codebook,
        rates=[str(plan.down_rates[0] / 2)],
        joint=plan.joint_inputs,
    )
    experts = random_experts(source, device="cuda")
    compiler.precompile(plan.keys)
    tokens = plan.max_tokens
    generator = torch.Generator("cuda").manual_seed(tokens)
    logits = torch.randn(tokens, plan.num_experts, device="cuda", generator=generator)
    weights, ids = torch.softmax(logits, dim=-1).topk(plan.top_k)
    x = torch.randn(tokens, plan.hidden, device="cuda", generator=generator).half()
    scratch = torch.full((plan.scratch_nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
    out = torch.full((tokens, plan.hidden), float("nan"), dtype=torch.float16, device="cuda")
    layer = PrefillLayer(experts, plan=plan, scratch=scratch)

    def launch() -> None:
        layer(x, ids.contiguous(), weights.contiguous(), out)

    launch()
    truth = float64_forward(experts, x[:_CHECKED], ids[:_CHECKED], weights[:_CHECKED])
    error = float((out[:_CHECKED].double() - truth).norm() / truth.norm())
    millis = graph_samples([launch], count=_REPLAYS, least=1).microseconds / 1e3
    operations = 2 * tokens * plan.top_k * plan.hidden * plan.width * (3 if plan.activation.gated else 2)
    return {
        "tokens": tokens,
        "ms": round(millis, 3),
        "tflops": round(operations / millis / 1e9, 1),
        "error": float(f"{error:.3g}"),
        "scratch": plan.scratch_nbytes,
        "kernels_ms": _kernels_ms(launch),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def _kernels_ms(launch: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of each part of one launch by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        launch()
        torch.cuda.synchronize()
    parts: dict[str, float] = {}
    for event in trace.key_averages():
        part = kernel_part(event.key)
        if part is not None:
            parts[part] = round(parts.get(part, 0.0) + event.device_time_total / 1e3, 3)
    return parts


if __name__ == "__main__":
    main()
