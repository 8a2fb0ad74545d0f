"""Owns the rows of single routes: where a launch leaves them, and their sum in slot order.  It must not know ranks.

Every path multiplies a route's row by itself and adds a token's rows in the order of its slots.  So rows from anywhere,
added by the same law, give the bits of one launch that holds all experts.

    path        rows                                      the law of the sum
    moe_small   float32, router weight applied            r0 + r1 + ..., in float32
    prefill     float16, before the weight                fma(row, weight, sum), in float32
    op_by_op    float32, before the weight                sum + row * weight, each rounded to float32; the weight
                                                          is one where the input was weighed
"""

from __future__ import annotations

import torch

from trellis_kernels import reduce_routes
from trellis_kernels.layers import PrefillPlan, sum_route_rows
from trellis_moe.plan import ExecutionPlan
from trellis_moe.scratch import ScratchSpec, align_fused
from trellis_moe.variants import OP_BY_OP, Variant

__all__ = ["FEW", "RouteRows", "row_bytes", "row_tokens"]

FEW = "moe_small"
"""Name of the path of few tokens, whose rows are added by an op of their own."""
_MANY = "prefill"
_ROWS = {FEW: "results", _MANY: "rows", OP_BY_OP: "route_output"}
_DTYPES = {FEW: torch.float32, _MANY: torch.float16, OP_BY_OP: torch.float32}


def row_tokens(variant: Variant) -> int:
    """Most tokens whose rows a launch leaves behind all at once."""
    return variant.fused.chunk_tokens if isinstance(variant.fused, PrefillPlan) else variant.tokens


def row_bytes(plan: ExecutionPlan, variant: Variant) -> int:
    """Bytes of the rows of one token."""
    return plan.capacity.top_k * plan.weights.source.geometry.padded_hidden_size * _DTYPES[variant.path].itemsize


class RouteRows:
    """The rows that one of a plan's launches leaves in its scratch.

    Args:
        plan: of the run.
        variant: the launch.
        arena: `[bytes] uint8`, the scratch that the plan was bound with.
        ones: `[tokens, top_k] float32` of ones, the weights of rows that have theirs; of the few-token launches.
    """

    def __init__(self, plan: ExecutionPlan, variant: Variant, arena: torch.Tensor, ones: torch.Tensor) -> None:
        self._path, self._top_k, self._ones = variant.path, plan.capacity.top_k, ones
        source = plan.weights.source
        self._num_experts = plan.capacity.route_experts or source.geometry.num_experts
        self._factor = source.up_divisor
        self._is_weighed = plan.routing.apply_router_weight_on_input
        self._backend = None if variant.path != OP_BY_OP else variant.backend("reduce_routes")
        specs = {spec.buffer.name: spec for spec in plan.scratch_specs() if spec.launch_tokens == variant.tokens}
        base = arena if variant.path == OP_BY_OP else align_fused(arena)
        self._rows = _view(base, specs[_ROWS[variant.path]], _DTYPES[variant.path])
        self._rows = self._rows.view(-1, self._top_k, source.geometry.padded_hidden_size)
        self._experts = _view(base, specs["experts"], torch.int64) if variant.path == OP_BY_OP else None

    def clear(self, tokens: int) -> None:
        """Before the launch: make the rows of routes that other ranks hold zero, since it does not write them."""
        if self._experts is None:
            self._rows[:tokens].zero_()

    def take(self, tokens: int) -> torch.Tensor:
        """After the launch: the rows, zero where the rank does not hold the expert.

        Returns:
            `[tokens, top_k, padded_hidden]`, a view of the scratch.
        """
        rows = self._rows[:tokens]
        if self._experts is not None:
            missing = self._experts[: tokens * self._top_k] < 0
            rows.view(-1, rows.shape[2]).masked_fill_(missing[:, None], 0.0)
        return rows

    def add(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Add each token's rows in slot order.

        Args:
            rows: `[tokens, top_k, padded_hidden]` of all experts.
            topk_ids: `[tokens, top_k]`, ids of the whole layer; one outside it adds nothing, whatever its weight.
            topk_weights: `[tokens, top_k]`.
            out: `[tokens, hidden]`; written whole.
        """
        flat = rows.view(-1, rows.shape[2])
        if self._path == _MANY:
            sum_route_rows(flat, topk_ids, topk_weights, num_experts=self._num_experts, factor=self._factor, out=out)
        elif self._path == FEW:
            reduce_routes(flat, self._ones[: rows.shape[0]], out=out)
        else:
            dropped = (topk_ids < 0) | (topk_ids >= self._num_experts)
            weights = torch.ones_like(topk_weights) if self._is_weighed else topk_weights
            weights = weights.float().masked_fill(dropped, 0.0)
            reduce_routes(flat, weights, factor=self._factor, out=out, backend=self._backend)
        return out


def _view(base: torch.Tensor, spec: ScratchSpec, dtype: torch.dtype) -> torch.Tensor:
    return base[spec.first : spec.first + spec.buffer.nbytes].view(dtype)
