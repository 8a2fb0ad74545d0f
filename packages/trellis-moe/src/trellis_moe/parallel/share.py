"""Owns the share of a layer that a rank of a grid holds: its experts, its extent, and the map that routing reads.

It must not know process groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_moe.errors import MoeValueError
from trellis_prep import RankGrid, even_extents, select_experts
from trellis_prep.expert_shares import expert_map, expert_ranges

__all__ = ["LayerShare", "expert_grid", "layer_share", "tensor_grid"]


@dataclass(frozen=True, eq=False)
class LayerShare:
    """What a rank prepares.

    Attributes:
        source: the layer of the rank's experts, over the whole intermediate axis.
        weights: its arrays; views of the layer's.
        extent: the rank's part of the intermediate axis.
        expert_map: `[experts] int32` on the CPU: local index of each expert of the layer, -1 where another rank holds
            it; None where the rank holds all.
    """

    source: TrellisSource
    weights: TrellisWeights
    extent: TrellisExtent
    expert_map: torch.Tensor | None


def tensor_grid(source: TrellisSource, world_size: int) -> RankGrid:
    """All experts on every rank, the intermediate axis shared out evenly; ranks beyond its blocks hold nothing.

    Args:
        source: the layer.
        world_size: ranks.

    Raises:
        PrepTypeError, PrepValueError: if the number is not a positive int.
    """
    geometry = source.geometry
    extents = even_extents(geometry.padded_intermediate_size, world_size, allow_empty=True)
    return RankGrid(extents, (range(geometry.num_experts),))


def expert_grid(source: TrellisSource, expert_size: int, tensor_size: int = 1) -> RankGrid:
    """Experts shared out evenly, and within each share of them the intermediate axis.

    Args:
        source: the layer.
        expert_size: ranks that share the experts; those beyond their number hold none.
        tensor_size: ranks that share each share's intermediate axis.

    Raises:
        PrepTypeError, PrepValueError: if a number is not a positive int.
    """
    geometry = source.geometry
    extents = even_extents(geometry.padded_intermediate_size, tensor_size, allow_empty=True)
    return RankGrid(extents, expert_ranges(geometry.num_experts, expert_size, allow_empty=True))


def layer_share(source: TrellisSource, weights: TrellisWeights, grid: RankGrid, rank: int) -> LayerShare:
    """A rank's share of a layer; nothing is read.

    A rank without experts holds the first one, to which no route leads, so that it plans what its peers plan.

    Args:
        source: the layer.
        weights: its arrays.
        grid: who holds what.
        rank: in the grid.

    Raises:
        MoeValueError: if the grid is of another layer; names both numbers.
        PrepTypeError, PrepValueError: if the rank is outside the grid.
    """
    share, geometry = grid.share(rank), source.geometry
    experts = max(ids.stop for ids in grid.experts)
    if experts != geometry.num_experts:
        raise MoeValueError(f"the grid shares out {experts} experts, the layer has {geometry.num_experts}")
    axis = share.extent.global_intermediate_size
    if axis != geometry.padded_intermediate_size:
        raise MoeValueError(
            f"the grid shares out {axis} intermediate channels, the layer has {geometry.padded_intermediate_size}"
        )
    if len(share.experts) == geometry.num_experts:
        return LayerShare(source, weights, share.extent, None)
    table = torch.from_numpy(expert_map(geometry.num_experts, share.experts))
    chosen = share.experts if len(share.experts) else range(1)
    return LayerShare(*select_experts(source, weights, chosen), share.extent, table)
