"""Holds a rank's share to slices of the whole: the codes, the extent, and the map of experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe.samples import make_layer
from trellis_moe import MoeValueError
from trellis_moe.parallel import expert_grid, layer_share, tensor_grid
from trellis_prep import RankGrid, even_extents


@pytest.mark.parametrize(("expert_size", "tensor_size"), [(1, 2), (2, 1), (3, 1), (2, 2), (7, 1), (1, 5)])
def test_the_ranks_hold_everything_once(expert_size: int, tensor_size: int) -> None:
    layer = make_layer(experts=5, hidden=128, intermediate=384)
    grid = expert_grid(layer.source, expert_size, tensor_size)
    held = np.zeros((5, 12), dtype=int)  # experts by slots
    for rank in range(grid.world_size):
        share = layer_share(layer.source, layer.weights, grid, rank)
        table = torch.arange(5) if share.expert_map is None else share.expert_map
        for expert, local in enumerate(table.tolist()):
            if local < 0:
                continue
            held[expert, share.extent.first_slot : share.extent.first_slot + share.extent.slot_count] += 1
            for projection in range(3):
                mine = share.weights.code_view(local, projection).read()
                np.testing.assert_array_equal(mine, layer.weights.code_view(expert, projection).read())
    assert (held == 1).all()


def test_a_rank_that_holds_all_experts_needs_no_map() -> None:
    layer = make_layer(experts=2, hidden=128, intermediate=256)
    share = layer_share(layer.source, layer.weights, tensor_grid(layer.source, 2), 1)
    assert share.expert_map is None
    assert share.source is layer.source


def test_a_rank_without_experts_maps_none() -> None:
    layer = make_layer(experts=2, hidden=128, intermediate=128)
    share = layer_share(layer.source, layer.weights, expert_grid(layer.source, 3), 2)
    assert share.expert_map is not None
    assert share.expert_map.tolist() == [-1, -1]
    assert share.source.geometry.num_experts == 1  # a stand-in, so that it plans as its peers


def test_a_grid_of_another_layer_is_refused() -> None:
    layer = make_layer(experts=2, hidden=128, intermediate=256)
    with pytest.raises(MoeValueError, match="shares out 3 experts, the layer has 2"):
        layer_share(layer.source, layer.weights, RankGrid(even_extents(256, 2), (range(3),)), 0)
    with pytest.raises(MoeValueError, match="shares out 384 intermediate channels, the layer has 256"):
        layer_share(layer.source, layer.weights, RankGrid(even_extents(384, 3), (range(2),)), 0)
