"""Owns the fused paths: a layer in a fixed sequence of launches on a GPU.  It must not choose when they are taken."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_kernels.layers import LayerLaunch, MoeSmallKey, PrefillPlan, moe_small, precompile_layer, prefill_layer
from trellis_moe.plan import ExecutionPlan
from trellis_moe.scratch import FUSED_ALIGNMENT, FUSED_BUFFER
from trellis_prep import PreparedExperts

__all__ = ["FewTokens", "ManyTokens"]

Progress = Callable[[int, int], None]


def _aligned(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    """The kernels' scratch: the buffer from the first boundary that they ask for."""
    arena = buffers[FUSED_BUFFER]
    return arena[-arena.data_ptr() % FUSED_ALIGNMENT :]


class FewTokens:
    """One layer's launch through the kernels of few tokens, compiled when it is bound."""

    def __init__(
        self, plan: ExecutionPlan, key: MoeSmallKey, experts: PreparedExperts, buffers: dict[str, torch.Tensor]
    ) -> None:
        self._max_tokens = plan.capacity.max_tokens
        self._key = key
        self._experts = experts
        self._scratch = _aligned(buffers)
        precompile_layer(key)

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Progress,
    ) -> torch.Tensor:
        """Launch; arguments as `Binding.run`, already checked, at least one token."""
        moe_small(
            x,
            self._experts,
            topk_ids,
            topk_weights,
            key=self._key,
            max_tokens=self._max_tokens,
            scratch=self._scratch,
            out=out,
            factor=self._experts.source.up_divisor,
        )
        progress(1, 1)
        return out


class ManyTokens:
    """One layer's launch through the kernels of many tokens, compiled when it is bound."""

    def __init__(self, prefill: PrefillPlan, experts: PreparedExperts, buffers: dict[str, torch.Tensor]) -> None:
        self._factor = experts.source.up_divisor
        self._layer: LayerLaunch = prefill_layer(experts, plan=prefill, scratch=_aligned(buffers))
        precompile_layer(prefill)

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Progress,
    ) -> torch.Tensor:
        """Launch; arguments as `Binding.run`, already checked, at least one token."""
        self._layer(x, topk_ids, topk_weights, out, factor=self._factor)
        progress(1, 1)
        return out
