"""Owns the path of few tokens: a layer in one fused launch sequence on a GPU.  It must not choose when it is taken."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_kernels.layers import MoeSmallKey, moe_small, precompile_layer
from trellis_moe.plan import ExecutionPlan
from trellis_moe.scratch import FEW_TOKENS_ALIGNMENT, FEW_TOKENS_BUFFER
from trellis_prep import PreparedExperts

__all__ = ["FewTokens"]


class FewTokens:
    """One layer's launch through the fused kernels of the plan's key, compiled when it is bound."""

    def __init__(
        self, plan: ExecutionPlan, key: MoeSmallKey, experts: PreparedExperts, buffers: dict[str, torch.Tensor]
    ) -> None:
        self._plan = plan
        self._key = key
        self._experts = experts
        arena = buffers[FEW_TOKENS_BUFFER]
        past = -arena.data_ptr() % FEW_TOKENS_ALIGNMENT
        self._scratch = arena[past:]
        precompile_layer(key)

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Callable[[int, int], None],
    ) -> torch.Tensor:
        """Launch; arguments as `Binding.run`, already checked, at least one token."""
        moe_small(
            x,
            self._experts,
            topk_ids,
            topk_weights,
            key=self._key,
            max_tokens=self._plan.capacity.max_tokens,
            scratch=self._scratch,
            out=out,
            factor=self._experts.source.up_divisor,
        )
        progress(1, 1)
        return out
