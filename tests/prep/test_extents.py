"""Holds the partition of the intermediate axis to cover it once, in whole blocks, and to refuse with numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.extent import TrellisExtent
from trellis_prep import PrepTypeError, PrepValueError, check_extent, even_extents, rank_extent


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


def test_ranks_beyond_the_blocks_may_be_empty_at_the_end() -> None:
    extents = even_extents(384, 5, allow_empty=True)
    assert [(extent.first_channel, extent.width) for extent in extents] == [
        (0, 128),
        (128, 128),
        (256, 128),
        (384, 0),
        (384, 0),
    ]
    assert rank_extent(384, 4, 5, allow_empty=True) == extents[4]
    assert even_extents(384, 3, allow_empty=True) == even_extents(384, 3)
    with pytest.raises(PrepValueError, match="0 ranks"):
        even_extents(384, 0, allow_empty=True)


def slots(first: int, count: int) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=3072, first_slot=first, slot_count=count)


@pytest.mark.parametrize("extent", [(0, 96), (0, 48), (48, 48), (44, 4), (48, 0)])
def test_legal_extents_are_given_back(extent: tuple[int, int]) -> None:
    barriers = [] if extent == (0, 96) else [48]
    assert check_extent(slots(*extent), barriers=barriers) == slots(*extent)


@pytest.mark.parametrize(
    ("extent", "nearest"), [((2, 4), r"0\.\.8"), ((4, 3), r"4\.\.8"), ((1, 1), r"0\.\.4"), ((95, 1), r"92\.\.96")]
)
def test_misaligned_extent_names_the_nearest(extent: tuple[int, int], nearest: str) -> None:
    with pytest.raises(PrepValueError, match=rf"first slot {extent[0]} and count {extent[1]} .* 4 slots; .*{nearest}"):
        check_extent(slots(*extent))


def test_crossing_extent_names_the_barrier() -> None:
    with pytest.raises(PrepValueError, match=r"barrier at slot 48; nearest legal: 40\.\.48 or 48\.\.56"):
        check_extent(slots(40, 16), barriers=[60, 48])


def test_extent_is_no_bare_number() -> None:
    with pytest.raises(PrepTypeError, match="must be a TrellisExtent, got int"):
        check_extent(384)  # type: ignore[arg-type]
