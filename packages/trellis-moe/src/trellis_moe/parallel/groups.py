"""Owns the process groups of a grid of ranks: all of them, those that share experts, those that share an extent.

It must not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from trellis_moe.errors import MoeValueError
from trellis_moe.parallel.collectives import Ranks
from trellis_moe.parallel.mapped import MappedRanks, map_memory
from trellis_moe.parallel.one_shot import OneShot, open_one_shot
from trellis_prep import RankGrid

__all__ = ["GridGroups", "open_groups"]


@dataclass(frozen=True, eq=False)
class GridGroups:
    """The groups that one rank is in; layers of one grid share them.

    Attributes:
        grid: who holds what.
        world: all ranks.
        tensor: the ranks that share this rank's experts, None where it is alone.
        expert: the ranks that share this rank's extent, None where it is alone.
    """

    grid: RankGrid
    world: Ranks
    tensor: Ranks | None
    expert: Ranks | None
    _one_shots: dict[tuple[int, torch.device], OneShot | None] = field(default_factory=dict)
    _mapped: dict[tuple[bool, int, torch.device], MappedRanks] = field(default_factory=dict)

    def mapped(self, over: Ranks, nbytes: int, device: torch.device) -> MappedRanks:
        """Memory that some of the ranks map, made once and shared by layers that run one after the other.

        Args:
            over: `world` or `tensor`.
            nbytes: of each rank; the same on every one.
            device: of this rank.

        Raises:
            MoeDistributedError: as `map_memory`.
        """
        place = (over is self.world, nbytes, device)
        if place not in self._mapped:
            self._mapped[place] = map_memory(over, nbytes, device)
        return self._mapped[place]

    def one_shot(self, nbytes: int, device: torch.device) -> OneShot | None:
        """The all-reduce over all ranks by direct reads, opened once and shared by layers that run one after the other.

        Args:
            nbytes: most bytes of a sum; the same on every rank.
            device: of this rank.

        Returns:
            None where there is nothing to add up, or a rank cannot.
        """
        if not nbytes:
            return None
        if (nbytes, device) not in self._one_shots:
            self._one_shots[nbytes, device] = open_one_shot(self.world, nbytes, device)
        return self._one_shots[nbytes, device]

    @property
    def rank(self) -> int:
        """Of this process in the grid."""
        return self.world.rank


def open_groups(
    grid: RankGrid, group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None
) -> GridGroups:
    """The groups of a grid; every rank of the group has to call it, in the same order as any other opening.

    Args:
        grid: who holds what.
        group: its ranks, in the order of the grid (default: all processes).
        timeout: of the collectives of groups that are made here (default: torch's).

    Raises:
        MoeValueError: if torch.distributed is not initialised, or the group has another size than the grid.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise MoeValueError("torch.distributed is not initialised; call init_process_group first")
    whole = dist.group.WORLD if group is None else group
    assert whole is not None  # initialised
    size = dist.get_world_size(whole)
    if size != grid.world_size:
        raise MoeValueError(
            f"the grid is of {grid.expert_size} x {grid.tensor_size} = {grid.world_size} ranks, the group has {size}"
        )
    members = dist.get_process_group_ranks(whole)

    def open_one(ranks: range) -> Ranks | None:
        if len(ranks) == 1:
            return None
        if len(ranks) == size:
            return Ranks(whole)
        # only the members take part: ranks outside the group may be doing something else
        chosen = [members[rank] for rank in ranks]
        part = dist.new_group(chosen, use_local_synchronization=True, timeout=timeout)
        assert isinstance(part, dist.ProcessGroup)  # this rank is a member
        return Ranks(part)

    world = Ranks(whole)
    expert_rank, tensor_rank = divmod(world.rank, grid.tensor_size)
    tensor = open_one(grid.tensor_group(expert_rank))
    return GridGroups(grid, world, tensor, open_one(grid.expert_group(tensor_rank)))
