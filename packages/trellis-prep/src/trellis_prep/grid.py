"""Owns the grid of ranks that share both axes: extents of the intermediate axis by ranges of experts.

It must not know tensors or process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trellis_format.extent import TrellisExtent
from trellis_prep.errors import PrepTypeError, PrepValueError
from trellis_prep.extents import check_index

__all__ = ["RankGrid", "RankShare"]


@dataclass(frozen=True)
class RankShare:
    """What one rank holds of a layer.

    Attributes:
        rank: in the whole grid.
        tensor_rank: among the ranks that share this rank's experts.
        expert_rank: among the ranks that share this rank's extent.
        extent: its part of the intermediate axis.
        experts: ids of its experts.
    """

    rank: int
    tensor_rank: int
    expert_rank: int
    extent: TrellisExtent
    experts: range


@dataclass(frozen=True)
class RankGrid:
    """Tensor-parallel by expert-parallel ranks; rank = expert_rank * tensor_size + tensor_rank.

    Ranks that share experts are neighbours, since they add their outputs up for every token.

    Args:
        extents: one per tensor-parallel rank, from one planner.
        experts: one per expert-parallel rank.

    Raises:
        PrepTypeError: if an extent is not a `TrellisExtent` or experts are not ranges.
        PrepValueError: if the extents do not cover one axis once, or the ranges do not cover 0 to their end once.
    """

    extents: tuple[TrellisExtent, ...]
    experts: tuple[range, ...]

    def __post_init__(self) -> None:
        for name, items, kind in (("extents", self.extents, TrellisExtent), ("experts", self.experts, range)):
            if not isinstance(items, tuple) or not all(isinstance(item, kind) for item in items):
                raise PrepTypeError(f"grid {name} must be a tuple of {kind.__name__}")
            if not items:
                raise PrepValueError(f"grid {name} must name at least one rank")
        sizes = {extent.global_intermediate_size for extent in self.extents}
        if len(sizes) > 1:
            raise PrepValueError(f"extents are of axes of different sizes: {sorted(sizes)} channels")
        _check_cover("channels", [(e.first_channel, e.end_channel) for e in self.extents], sizes.pop())
        if any(ids.step != 1 for ids in self.experts):
            raise PrepValueError("expert ranges must have a step of 1")
        _check_cover("experts", [(ids.start, ids.stop) for ids in self.experts], max(ids.stop for ids in self.experts))

    @property
    def tensor_size(self) -> int:
        """Ranks that share one set of experts."""
        return len(self.extents)

    @property
    def expert_size(self) -> int:
        """Ranks that share one extent."""
        return len(self.experts)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tensor_size * self.expert_size

    def share(self, rank: int) -> RankShare:
        """What a rank holds.

        Raises:
            PrepTypeError: if the rank is not an int.
            PrepValueError: if it is outside the grid.
        """
        expert_rank, tensor_rank = divmod(check_index("rank", rank, self.world_size), self.tensor_size)
        return RankShare(rank, tensor_rank, expert_rank, self.extents[tensor_rank], self.experts[expert_rank])

    def tensor_group(self, expert_rank: int) -> range:
        """The ranks whose outputs add up to those of one range of experts.

        Raises:
            PrepTypeError: if the argument is not an int.
            PrepValueError: if it is outside the grid.
        """
        first = check_index("expert_rank", expert_rank, self.expert_size) * self.tensor_size
        return range(first, first + self.tensor_size)

    def expert_group(self, tensor_rank: int) -> range:
        """The ranks that hold one extent of all experts.

        Raises:
            PrepTypeError: if the argument is not an int.
            PrepValueError: if it is outside the grid.
        """
        return range(check_index("tensor_rank", tensor_rank, self.tensor_size), self.world_size, self.tensor_size)


def _check_cover(what: str, parts: Sequence[tuple[int, int]], size: int) -> None:
    place = 0
    for first, end in sorted(part for part in parts if part[1] > part[0]):
        if first != place:
            fault = "overlap" if first < place else "leave a hole"
            raise PrepValueError(f"shares of {what} {fault} at {min(first, place)}..{max(first, place)}")
        place = end
    if place != size:
        raise PrepValueError(f"shares of {what} end at {place}, not at {size}")
