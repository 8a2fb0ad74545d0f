"""Owns the exchange of single routes' rows between ranks that hold different experts, and their sum in slot order.

It must not know weights.  Each row is held by one rank and zero on all others, so adding them up over the ranks in any
order changes no bit; then every token's rows are added by the law of one launch (`trellis_moe.parallel.rows`).
"""

from __future__ import annotations

import torch

from trellis_moe.binding import Binding
from trellis_moe.parallel.collectives import Ranks
from trellis_moe.parallel.plan import SMALL_ROWS_BYTES, ParallelPlan
from trellis_moe.parallel.rows import RouteRows, row_bytes, row_tokens
from trellis_moe.specs import IO_DTYPES
from trellis_moe.variants import Variant

__all__ = ["RowExchange"]


class RowExchange:
    """A layer whose routes are shared out over the ranks of a group.

    Args:
        plan: of this rank.
        binding: of its launches.
        ranks: those that hold the other experts.
        arena: the scratch of its launches.
        buffers: `own_rows` and `own_sums`, where the plan has them.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        binding: Binding,
        ranks: Ranks,
        arena: torch.Tensor,
        buffers: dict[str, torch.Tensor],
    ) -> None:
        execution = plan.execution
        self._plan, self._binding, self._ranks, self._buffers = plan, binding, ranks, buffers
        shape = (plan.most_few_tokens, execution.capacity.top_k)
        ones = torch.ones(shape, dtype=torch.float32, device=arena.device)
        self._rows = {v.tokens: RouteRows(execution, v, arena, ones) for v in execution.variants}
        self._partial_dtype = IO_DTYPES[plan.partial_dtype]

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Run this rank's routes, and leave every token's sum over all routes on every rank.

        Args:
            x: `[tokens, hidden]`.
            topk_ids: `[tokens, top_k]`.
            topk_weights: `[tokens, top_k]`.
            target: `[tokens, hidden]` in the dtype of partial sums; written whole.
        """
        for first, tokens, variant in self._plan.execution.cut(x.shape[0]):
            most = row_tokens(variant)
            for begin in range(first, first + tokens, most):
                piece = slice(begin, min(begin + most, first + tokens))
                self._piece(variant, x[piece], topk_ids[piece], topk_weights[piece], target[piece])

    def _piece(
        self,
        variant: Variant,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        tokens, size = x.shape[0], self._ranks.size
        routes = self._rows[variant.tokens]
        routes.clear(tokens)
        self._binding.launch(variant, x, topk_ids, topk_weights, out=target)
        rows = routes.take(tokens)
        shared = tokens - tokens % size  # tokens whose sums are shared out
        if tokens * row_bytes(self._plan.execution, variant) <= SMALL_ROWS_BYTES:
            shared = 0
        if shared:
            own = shared // size
            part = slice(self._ranks.rank * own, (self._ranks.rank + 1) * own)
            own_rows = self._buffers["own_rows"].view(rows.dtype)[: own * rows[0].numel()].view(own, *rows.shape[1:])
            sums = self._buffers["own_sums"][:own]
            self._ranks.reduce_scatter(own_rows, rows[:shared])
            routes.add(own_rows, topk_ids[part], topk_weights[part], sums)
            self._ranks.all_gather(target[:shared], sums)
        if shared < tokens:
            self._ranks.all_reduce(rows[shared:]).wait()
            routes.add(rows[shared:], topk_ids[shared:], topk_weights[shared:], target[shared:])
