"""Owns the fused paths: a layer in a fixed sequence of launches on a GPU.  It must not choose when they are taken."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_kernels.layers import LayerLaunch, MoeSmallKey, moe_small_layer, prefill_layer
from trellis_moe.scratch import align_fused
from trellis_moe.variants import Variant
from trellis_prep import PreparedExperts

__all__ = ["FusedLaunch"]

Progress = Callable[[int, int], None]


class FusedLaunch:
    """One layer's launch through the kernels of few or of many tokens.

    Args:
        variant: the launch; it has fused kernels.
        experts: the layer.
        arena: bytes that hold its scratch.
        expert_map: `[global experts] int32 or int64`, see `trellis_moe.binding.bind`.
    """

    def __init__(
        self, variant: Variant, experts: PreparedExperts, arena: torch.Tensor, expert_map: torch.Tensor | None
    ) -> None:
        assert variant.fused is not None  # a binding takes this path for such launches alone
        scratch = align_fused(arena)
        self._factor = experts.source.up_divisor
        self._expert_map = expert_map
        self._layer: LayerLaunch
        if isinstance(variant.fused, MoeSmallKey):
            self._layer = moe_small_layer(experts, key=variant.fused, max_tokens=variant.tokens, scratch=scratch)
        else:
            self._layer = prefill_layer(experts, plan=variant.fused, scratch=scratch)

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
