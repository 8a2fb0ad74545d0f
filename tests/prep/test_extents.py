"""Holds the partition of the intermediate axis to cover it once, in whole blocks, and to refuse with numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_prep import PrepTypeError, PrepValueError, even_extents, rank_extent


@pytest.mark.parametrize(
    ("blocks", "world", "shares"),
    [
        (6, 4, [2, 2, 1, 1]),  # Qwen3-30B-A3B
        (11, 2, [6, 5]),  # GLM-4.5-Air
        (11, 4, [3, 3, 3, 2]),
        (11, 8, [2, 2, 2, 1, 1, 1, 1, 1]),
        (16, 8, [2] * 8),  # DeepSeek-V3
        (1, 1, [1]),
    ],
)
def test_first_ranks_take_the_remainder(blocks: int, world: int, shares: list[int]) -> None:
    assert [extent.width // 128 for extent in even_extents(blocks * 128, world)] == shares


@given(st.data())
def test_shares_cover_every_channel_once(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 40))
    world = data.draw(st.integers(1, blocks))
    extents = even_extents(blocks * 128, world)
    hits = np.zeros(blocks * 128, dtype=int)
    for extent in extents:
        extent.check_blocks()
        hits[extent.channels] += 1
    assert (hits == 1).all()
    assert [extent.first_slot for extent in extents] == sorted(extent.first_slot for extent in extents)
    assert max(extent.width for extent in extents) - min(extent.width for extent in extents) <= 128
    assert [rank_extent(blocks * 128, rank, world) for rank in range(world)] == list(extents)


@pytest.mark.parametrize(("blocks", "world"), [(6, 7), (11, 12), (16, 17), (24, 25), (6, 0), (6, -1)])
def test_more_ranks_than_blocks_names_the_most(blocks: int, world: int) -> None:
    with pytest.raises(PrepValueError, match=rf"{world} ranks .* 1 to {blocks}$"):
        even_extents(blocks * 128, world)


@pytest.mark.parametrize(("size", "near"), [(0, 128), (-128, 128), (100, 128), (2880, 2944)])
def test_axis_that_is_not_blocks_names_the_nearest(size: int, near: int) -> None:
    with pytest.raises(PrepValueError, match=rf"axis of {size} channels .* {near}"):
        even_extents(size, 1)


@pytest.mark.parametrize("rank", [-1, 3])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(PrepValueError, match=rf"rank {rank} is outside 0\.\.2"):
        rank_extent(384, rank, 3)


@pytest.mark.parametrize("bad", [True, 2.0, "2", None])
def test_numbers_must_be_ints(bad: object) -> None:
    with pytest.raises(PrepTypeError, match="intermediate_size must be an int"):
        even_extents(bad, 1)  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match="world_size must be an int"):
        even_extents(256, bad)  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match="rank must be an int"):
        rank_extent(256, bad, 2)  # type: ignore[arg-type]
