"""Owns the fused paths: a layer in a fixed sequence of launches on a GPU.  It must not choose when they are taken."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_kernels.layers import LayerLaunch, MoeSmallKey, PrefillPlan, moe_small, prefill_layer
from trellis_moe.scratch import align_fused
from trellis_prep import PreparedExperts

__all__ = ["FewTokens", "ManyTokens"]

Progress = Callable[[int, int], None]


class FewTokens:
    """One layer's launch through the kernels of few tokens.

    Args:
        tokens: most tokens.
        key: the kernels.
        experts: the layer.
        arena: bytes that hold its scratch.
        expert_map: `[global experts] int32 or int64`, see `trellis_moe.binding.bind`.
    """

    def __init__(
        self,
        tokens: int,
        key: MoeSmallKey,
        experts: PreparedExperts,
        arena: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        self._max_tokens = tokens
        self._key = key
        self._experts = experts
        self._scratch = align_fused(arena)
        self._expert_map = expert_map

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
            expert_map=self._expert_map,
            factor=self._experts.source.up_divisor,
        )
        progress(1, 1)
        return out


class ManyTokens:
    """One layer's launch through the kernels of many tokens; arguments as `FewTokens`."""

    def __init__(
        self,
        prefill: PrefillPlan,
        experts: PreparedExperts,
        arena: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        self._factor = experts.source.up_divisor
        self._expert_map = expert_map
        self._layer: LayerLaunch = prefill_layer(experts, plan=prefill, scratch=align_fused(arena))

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Progress,
    ) -> torch.Tensor:
        """Launch; arguments as `Binding.run`, already checked, at least one token."""
        self._layer(x, topk_ids, topk_weights, out, expert_map=self._expert_map, factor=self._factor)
        progress(1, 1)
        return out
