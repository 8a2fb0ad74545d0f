"""Owns the door to fused layers: what a device can run, the choice of kernels, their scratch and their launch.

It must not know plans or checkpoints.  Nothing here imports `cutlass` before a kernel is compiled, so that planning
works on any machine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.moe_key import HEADER_BYTES, MoeSmallKey, Tiling, scratch_nbytes, scratch_parts
from trellis_kernels.cute.moe_plan import plan_moe_small
from trellis_kernels.cute.op_keys import PackKey
from trellis_kernels.cute.prefill_plan import SCRATCH_ALIGNMENT, PrefillPlan, plan_prefill
from trellis_kernels.errors import KernelUnsupportedError
from trellis_kernels.layer_keys import OpLayer, layer_keys, op_layer_keys
from trellis_kernels.ops import OPS, backend_for
from trellis_prep import PreparedExperts

__all__ = [
    "DeviceLimits",
    "LayerLaunch",
    "MoeSmallKey",
    "OpLayer",
    "PrefillPlan",
    "Tiling",
    "device_limits",
    "launch_scratch",
    "layer_keys",
    "moe_small",
    "moe_small_layer",
    "op_backends",
    "op_layer_keys",
    "plan_moe_small",
    "plan_prefill",
    "precompile_layer",
    "prefill_layer",
    "scratch_nbytes",
    "sum_route_rows",
]


@dataclass(frozen=True)
class DeviceLimits:
    """What kernels are chosen by.

    Args:
        arch: compile target, for example `sm_90a`.
        multiprocessors: of the device.
    """

    arch: str
    multiprocessors: int


def device_limits(device: torch.device | str) -> DeviceLimits | None:
    """The limits of a CUDA device; None where it is not one, none is visible, or no target covers it."""
    place = torch.device(device)
    if place.type != "cuda" or not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if place.index is None else place.index
    try:
        arch = arch_of_device(index).name
    except KernelUnsupportedError:
        return None
    return DeviceLimits(arch, torch.cuda.get_device_properties(index).multi_processor_count)


def op_backends(limits: DeviceLimits | None, num_experts: int = 1) -> tuple[tuple[str, str], ...]:
    """The backend of every op for a layer that runs one op after the other.

    Args:
        limits: of the device; None is one without kernels.
        num_experts: of the layer; kernels pack routes of so many at most.

    Returns:
        (op, backend) in the order of `OPS`.
    """
    beyond = {"pack_routes"} if num_experts > PackKey.EXPERT_CLASSES[-1] else set()
    kernels = [op for op in OPS if limits is not None and op not in beyond]
    return tuple((op, backend_for(op, torch.device("cuda")) if op in kernels else "cpu") for op in OPS)


def launch_scratch(kernels: MoeSmallKey | PrefillPlan, tokens: int) -> dict[str, int]:
    """Bytes of each part of the scratch of a fused layer, in order, with what rounds it up to its boundary.

    Args:
        kernels: of the layer.
        tokens: most tokens of a launch; a `PrefillPlan` has its own.
    """
    if isinstance(kernels, PrefillPlan):
        parts = kernels.scratch_parts.items()
        return {name: -(-nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for name, nbytes in parts}
    return {"header": HEADER_BYTES} | {name: tokens * each for name, each in scratch_parts(kernels).items() if each}


class LayerLaunch(Protocol):
    """A layer that is bound to its scratch; see `trellis_kernels.cute.prefill_layer.PrefillLayer.__call__`."""

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Launch on the current stream of the device."""
        ...


def precompile_layer(kernels: MoeSmallKey | PrefillPlan) -> None:
    """Compile a layer's kernels and load them, so that a launch has nothing left to do.

    Raises:
        KernelUnsupportedError: if nvidia-cutlass-dsl is not installed.
    """
    importlib.import_module("trellis_kernels.cute.compiler").precompile(layer_keys(kernels))


def prefill_layer(experts: PreparedExperts, *, plan: PrefillPlan, scratch: torch.Tensor) -> LayerLaunch:
    """A layer for many tokens, bound to its scratch; see `trellis_kernels.cute.prefill_layer.PrefillLayer`."""
    layer: LayerLaunch = importlib.import_module("trellis_kernels.cute.prefill_layer").PrefillLayer(
        experts, plan=plan, scratch=scratch
    )
    return layer


def moe_small_layer(
    experts: PreparedExperts, *, key: MoeSmallKey, max_tokens: int, scratch: torch.Tensor
) -> LayerLaunch:
    """A layer for few tokens, bound to its scratch; see `trellis_kernels.cute.moe_small.MoeSmall`."""
    layer: LayerLaunch = importlib.import_module("trellis_kernels.cute.moe_small").MoeSmall(
        experts, key=key, max_tokens=max_tokens, scratch=scratch
    )
    return layer


def moe_small(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    key: MoeSmallKey,
    max_tokens: int,
    scratch: torch.Tensor,
    out: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """The routed experts of a layer for few tokens; see `trellis_kernels.cute.moe_small.moe_small`."""
    launch = importlib.import_module("trellis_kernels.cute.moe_small").moe_small
    result: torch.Tensor = launch(
        x,
        experts,
        topk_ids,
        topk_weights,
        key=key,
        max_tokens=max_tokens,
        scratch=scratch,
        out=out,
        expert_map=expert_map,
        factor=factor,
    )
    return result


def sum_route_rows(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    factor: float = 1.0,
    out: torch.Tensor,
) -> torch.Tensor:
    """Each token's weighted rows of the many-token kernels, added in slot order; see `cute.prefill.sum_rows`.

    Args:
        rows: `[tokens * top_k, padded channels] float16`, by flat route; rows of dropped routes hold anything.
        topk_ids: `[tokens, top_k] int32 or int64`; a route outside [0, num_experts) is dropped.
        topk_weights: `[tokens, top_k]`, float16, bfloat16 or float32.
        num_experts: experts that ids may name.
        factor: multiplies every weight.
        out: `[tokens, channels]`, float32, float16 or bfloat16, channels a multiple of 8; written whole.

    Returns:
        `out`.
    """
    importlib.import_module("trellis_kernels.cute.prefill").sum_rows(
        rows, topk_ids, topk_weights, num_experts=num_experts, expert_map=None, factor=factor, out=out
    )
    return out
