"""Owns the choice between the fused paths of a GPU and op by op.  It must not launch.

The choice reads declarations and device limits alone, never weights or routing, so that a token's bits depend on the
plan and not on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_kernels import KernelError
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, PrefillPlan, fuses, plan_moe_small, plan_prefill
from trellis_moe.specs import ID_DTYPES, ActivationSpec, ExecutionCapacity, RoutingSpec

if TYPE_CHECKING:
    from trellis_moe.plan import WeightPlan

__all__ = ["Fused", "choose_fused"]

Fused = MoeSmallKey | PrefillPlan
"""The kernels of a fused path: for few tokens, or for many."""

_MOST_FEW_ROWS = 16.0  # routes of an average expert; beyond, the path of few tokens decodes a tile too often
_MOST_TOP_K = 32  # routes of a token whose sum the path of few tokens writes out
_MOST_GROUPS = 65535  # groups of one expert's routes that a launch of the path of few tokens covers


def choose_fused(
    weights: WeightPlan,
    activation: ActivationSpec,
    routing: RoutingSpec,
    capacity: ExecutionCapacity,
    limits: DeviceLimits,
) -> Fused | None:
    """The fused kernels for a launch, None where neither path takes it.

    Args:
        weights: the share of the layer.
        activation: dtypes and law.
        routing: dtypes of routes.
        capacity: the largest launch and the bound of its scratch.
        limits: what kernels are chosen by.
    """
    if weights.extent.width == 0 or not fuses(weights.source.codebook):
        return None
    experts = weights.source.geometry.num_experts
    if capacity.top_k <= _MOST_TOP_K and capacity.routes <= _MOST_FEW_ROWS * experts:
        few = _few_tokens(weights, activation, routing, capacity, limits)
        if few is not None:
            return few
    return _many_tokens(weights, activation, routing, capacity, limits)


def _few_tokens(
    weights: WeightPlan,
    activation: ActivationSpec,
    routing: RoutingSpec,
    capacity: ExecutionCapacity,
    limits: DeviceLimits,
) -> MoeSmallKey | None:
    try:
        key = plan_moe_small(
            weights.source,
            arch=limits.arch,
            max_tokens=capacity.max_tokens,
            top_k=capacity.top_k,
            multiprocessors=limits.multiprocessors,
            extent=weights.extent,
            activation=activation.nonlinearity,
            x_dtype=activation.io_dtype,
            out_dtype=activation.output_dtype,
            weight_dtype=routing.weight_dtype,
            id_bytes=ID_DTYPES[routing.id_dtype].itemsize,
        )
    except (KernelError, ValueError):
        return None  # a layer outside what the kernels take runs otherwise
    return key if key.most_groups(capacity.max_tokens) <= _MOST_GROUPS else None


def _many_tokens(
    weights: WeightPlan,
    activation: ActivationSpec,
    routing: RoutingSpec,
    capacity: ExecutionCapacity,
    limits: DeviceLimits,
) -> PrefillPlan | None:
    try:
        return plan_prefill(
            weights.source,
            arch=limits.arch,
            max_tokens=capacity.max_tokens,
            top_k=capacity.top_k,
            extent=weights.extent,
            activation=activation.nonlinearity,
            x_dtype=activation.io_dtype,
            out_dtype=activation.output_dtype,
            weight_dtype=routing.weight_dtype,
            scratch_bound=capacity.scratch_bound,
        )
    except (KernelError, ValueError):
        return None  # likewise
