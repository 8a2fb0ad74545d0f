"""Holds a grid of ranks to cover every channel of every expert once."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_prep import (
    PrepTypeError,
    PrepValueError,
    RankGrid,
    balanced_extents,
    even_extents,
    expert_ranges,
    partition_extents,
)


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (3, 1), (1, 4), (3, 4), (2, 5)])
def test_shares_cover_channels_by_experts_once(tensor: int, expert: int) -> None:
    grid = RankGrid(even_extents(384, tensor), expert_ranges(7, expert))
    assert (grid.tensor_size, grid.expert_size, grid.world_size) == (tensor, expert, tensor * expert)
    hits = np.zeros((384, 7), dtype=int)
    for rank in range(grid.world_size):
        share = grid.share(rank)
        assert (share.rank, share.expert_rank * tensor + share.tensor_rank) == (rank, rank)
        hits[share.extent.channels, share.experts.start : share.experts.stop] += 1
    assert (hits == 1).all()


def test_groups_meet_in_one_rank() -> None:
    grid = RankGrid(even_extents(384, 3), expert_ranges(8, 2))
    assert [list(grid.tensor_group(rank)) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [list(grid.expert_group(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    for rank in range(6):
        share = grid.share(rank)
        both = set(grid.tensor_group(share.expert_rank)) & set(grid.expert_group(share.tensor_rank))
        assert both == {rank}


def test_any_planner_and_empty_shares_fit() -> None:
    turned = RankGrid(balanced_extents(3072, 9, layer=4), expert_ranges(3, 4, allow_empty=True))
    assert turned.share(9).extent == balanced_extents(3072, 9)[4]
    assert len(turned.share(35).experts) == 0
    assert RankGrid(even_extents(256, 3, allow_empty=True), (range(4),)).share(2).extent.width == 0


@pytest.mark.parametrize("rank", [-1, 6])
def test_rank_outside_is_refused(rank: int) -> None:
    grid = RankGrid(even_extents(384, 3), expert_ranges(8, 2))
    with pytest.raises(PrepValueError, match=rf"rank {rank} is outside 0\.\.5"):
        grid.share(rank)
    with pytest.raises(PrepValueError, match=r"expert_rank -1 is outside 0\.\.1"):
        grid.tensor_group(-1)
    with pytest.raises(PrepValueError, match=r"tensor_rank 3 is outside 0\.\.2"):
        grid.expert_group(3)


def test_shares_that_do_not_fit_together_are_refused() -> None:
    whole, parts = even_extents(384, 1), even_extents(384, 3)
    experts = (range(4),)
    with pytest.raises(PrepValueError, match=r"channels overlap at 0\.\.384"):
        RankGrid(whole + whole, experts)
    with pytest.raises(PrepValueError, match=r"channels leave a hole at 128\.\.256"):
        RankGrid((parts[0], parts[2]), experts)
    with pytest.raises(PrepValueError, match="channels end at 256, not at 384"):
        RankGrid(parts[:2], experts)
    with pytest.raises(PrepValueError, match=r"different sizes: \[384, 512\]"):
        RankGrid(whole + even_extents(512, 1), experts)
    with pytest.raises(PrepValueError, match=r"experts leave a hole at 2\.\.3"):
        RankGrid(whole, (range(2), range(3, 5)))
    with pytest.raises(PrepValueError, match=r"experts overlap at 1\.\.2"):
        RankGrid(whole, (range(2), range(1, 5)))
    with pytest.raises(PrepValueError, match="step of 1"):
        RankGrid(whole, (range(0, 4, 2),))
    with pytest.raises(PrepValueError, match="extents must name at least one rank"):
        RankGrid((), experts)
    with pytest.raises(PrepTypeError, match="experts must be a tuple of range"):
        RankGrid(whole, (4,))  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match="extents must be a tuple of TrellisExtent"):
        RankGrid(list(partition_extents(384, 3)), experts)  # type: ignore[arg-type]
