"""Holds groups to the ranks of their grid, also in a part of all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe.parallel.ranks import run_ranks
from moe.samples import make_layer
from trellis_moe import MoeValueError
from trellis_moe.parallel import expert_grid, open_groups, tensor_grid


def members(rank: int, world: int) -> dict[str, Any]:
    """The processes of each of this rank's groups, for a grid over all and one over the last two."""
    source = make_layer(experts=4, hidden=128, intermediate=256).source
    whole = open_groups(expert_grid(source, 2, 2))
    found: dict[str, Any] = {"rank": whole.rank}
    for name in ("world", "tensor", "expert"):
        ranks = getattr(whole, name)
        found[name] = (dist.get_process_group_ranks(ranks.group), ranks.rank)
    lone = open_groups(tensor_grid(source, world))
    found["lone"] = (lone.tensor is not None and lone.tensor.size, lone.expert is None)
    if rank >= 2:
        part = dist.new_group([2, 3], use_local_synchronization=True)
        assert isinstance(part, dist.ProcessGroup)
        half = open_groups(tensor_grid(source, 2), part)
        found["half"] = (dist.get_process_group_ranks(half.world.group), half.rank)
        try:
            open_groups(tensor_grid(source, 3), part)
        except MoeValueError as error:
            found["refused"] = str(error)
    return found


def test_groups_are_the_ranks_of_the_grid(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 4, members)
    assert [each["world"] for each in found] == [([0, 1, 2, 3], rank) for rank in range(4)]
    assert [each["tensor"] for each in found] == [([0, 1], 0), ([0, 1], 1), ([2, 3], 0), ([2, 3], 1)]
    assert [each["expert"] for each in found] == [([0, 2], 0), ([1, 3], 0), ([0, 2], 1), ([1, 3], 1)]
    assert [each["lone"] for each in found] == [(4, True)] * 4
    assert [each["half"] for each in found[2:]] == [([2, 3], 0), ([2, 3], 1)]
    assert found[2]["refused"] == "the grid is of 1 x 3 = 3 ranks, the group has 2"


def test_groups_need_a_run_of_ranks() -> None:
    with pytest.raises(MoeValueError, match=r"torch\.distributed is not initialised"):
        open_groups(tensor_grid(make_layer().source, 1))
