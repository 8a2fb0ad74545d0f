"""Holds the experts' module to the layer that it wraps, launch by launch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trellis_moe.integrations.transformers.experts import TrellisExperts


class Layer(nn.Module):
    """Stands for a layer: notes the tokens of each launch and gives something that depends on every argument."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[int] = []

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.launches.append(x.shape[0])
        return x * (ids * weights).sum(-1, keepdim=True)


def routes(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 8, (tokens, 2), generator=generator), torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize(("tokens", "launches"), [(1, [1]), (4, [4]), (5, [4, 1]), (11, [4, 4, 3]), (0, [0])])
def test_launches_take_at_most_the_planned_tokens(tokens: int, launches: list[int]) -> None:
    layer = Layer()
    x, (ids, weights) = torch.randn(tokens, 16), routes(tokens)
    y = TrellisExperts(layer, 4)(x, ids, weights)
    assert layer.launches == launches
    assert torch.equal(y, x * (ids * weights).sum(-1, keepdim=True))


def test_leading_axes_of_the_tokens_are_kept() -> None:
    x, (ids, weights) = torch.randn(2, 3, 16), routes(6)
    experts = TrellisExperts(Layer(), 4)
    assert torch.equal(experts(x, ids, weights), experts(x.view(6, 16), ids, weights).view(2, 3, 16))
