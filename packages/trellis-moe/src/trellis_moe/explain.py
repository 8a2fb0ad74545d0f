"""Owns what a plan says of itself in words.  It must not decide anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_kernels.layers import PrefillPlan, layer_keys
from trellis_moe.variants import Variant

if TYPE_CHECKING:
    from trellis_moe.plan import ExecutionPlan

__all__ = ["explain"]

_REDUCTIONS = {
    "ordered": "each token's routes in slot order (deterministic)",
    "atomic": "routes in the order of arrival, in launches that say atomic (not deterministic)",
}


def explain(plan: ExecutionPlan) -> str:
    """What will run and why, a fact a line.

    Args:
        plan: the plan.
    """
    source, extent = plan.weights.source, plan.weights.extent
    geometry, law, capacity = source.geometry, plan.activation, plan.capacity
    rates = ", ".join(str(rate) for rate in source.rates.distinct())
    ids = "" if capacity.route_experts is None else f", ids of {capacity.route_experts} experts through a map"
    bound = "no bound of scratch" if capacity.scratch_bound is None else f"at most {capacity.scratch_bound} bytes"
    lines = [
        f"{geometry.num_experts} experts, codebook {source.codebook}, K = {rates}",
        f"hidden {geometry.hidden_size} channels, stored {geometry.padded_hidden_size}",
        f"intermediate {geometry.intermediate_size} channels, stored {geometry.padded_intermediate_size}",
        f"share: channels {extent.first_channel}..{extent.end_channel} of {extent.global_intermediate_size}",
        f"up to {capacity.max_tokens} tokens x {capacity.top_k} routes{ids}",
        f"activation {law.nonlinearity.kind}",
        f"dtypes: {law.io_dtype} in, {law.rotation_dtype} operands, float32 sums, {law.output_dtype} out",
        f"arithmetic: {law.arithmetic}",
        f"reduction: {_REDUCTIONS[plan.reduction]}",
        f"route weights multiply what experts {'take' if plan.routing.apply_router_weight_on_input else 'give'}",
        f"prepared {plan.weights.required_nbytes()} bytes",
        f"scratch {plan.required_nbytes()} bytes, shared by all launches; {bound}",
        f"{len(plan.compile_keys())} kernels to compile",
    ]
    for variant in plan.variants:
        lines += _launch(variant)
    if capacity.max_tokens > plan.direct_token_capacity:
        lines.append(f"more than {plan.direct_token_capacity} tokens are cut into launches of that many")
    if len(plan.variants) > 1:
        lines.append("a token's last bits may depend on which launch takes it, never on the tokens beside it")
    return "\n".join(lines)


def _launch(variant: Variant) -> list[str]:
    """One launch: its path, kernels and scratch, and why not another."""
    ops = ", ".join(f"{op} on {backend}" for op, backend in variant.backends)
    capturable = "" if variant.capturable else "; not for CUDA graphs"
    name = f"launch of up to {variant.tokens} tokens: {variant.path}, blocks of {variant.block_rows} rows"
    parts = ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in variant.scratch)
    lines = [
        f"{name}, {variant.arithmetic} products, {variant.reduction} sum, {ops}{capturable}",
        f"  scratch {variant.scratch_nbytes} bytes: {parts}",
    ]
    if variant.fused is not None:
        lines.append(f"  kernels: {', '.join(map(str, layer_keys(variant.fused)))}")
    if isinstance(variant.fused, PrefillPlan):
        chunk, window = variant.fused.chunk_tokens, variant.fused.window_slots
        lines.append(f"  in chunks of {chunk} tokens, whose packed routes pass in windows of {window} slots")
    lines += [f"  not {path}: {reason}" for path, reason in variant.rejected]
    return lines
