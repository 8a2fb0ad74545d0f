"""Owns the module that takes the place of a model's experts.  It must not know routers."""

from __future__ import annotations

import torch
from torch import nn

from trellis_moe.module import TrellisMoE

__all__ = ["TrellisExperts"]


class TrellisExperts(nn.Module):
    """The routed experts of a layer, under the signature that transformers' models call.

    Args:
        layer: the layer on its device.
        max_tokens: tokens of its largest launch; more are cut.
    """

    def __init__(self, layer: TrellisMoE, max_tokens: int) -> None:
        super().__init__()
        self.layer = layer
        self.max_tokens = max_tokens

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum each token's experts by their weights.

        Args:
            hidden_states: `[..., hidden]` in the model's dtype.
            top_k_index: `[tokens, top_k]` integers, as the model's router gives them.
            top_k_weights: `[tokens, top_k]` likewise.

        Returns:
            `[..., hidden]` in the model's dtype.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        step = self.max_tokens
        if x.shape[0] <= step:
            y: torch.Tensor = self.layer(x, top_k_index, top_k_weights)
        else:
            parts = [slice(first, first + step) for first in range(0, x.shape[0], step)]
            y = torch.cat([self.layer(x[part], top_k_index[part], top_k_weights[part]) for part in parts])
        return y.reshape(hidden_states.shape)
