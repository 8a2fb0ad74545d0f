"""Holds the share of experts to cover each once, and the maps to be inverses of what a rank owns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_prep import PrepTypeError, PrepValueError, expert_map, expert_ranges


@given(experts=st.integers(1, 300), world=st.integers(1, 300))
def test_every_expert_is_owned_once(experts: int, world: int) -> None:
    ranges = expert_ranges(experts, world, allow_empty=True)
    assert [expert for owned in ranges for expert in owned] == list(range(experts))
    sizes = [len(owned) for owned in ranges]
    assert len(sizes) == world
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    if world <= experts:
        assert expert_ranges(experts, world) == ranges


def test_first_ranks_take_the_remainder() -> None:
    assert expert_ranges(8, 3) == (range(3), range(3, 6), range(6, 8))


@pytest.mark.parametrize("world", [0, -1, 9])
def test_more_ranks_than_experts_name_the_most(world: int) -> None:
    with pytest.raises(PrepValueError, match=rf"{world} ranks cannot share 8 experts: .* 1 to 8"):
        expert_ranges(8, world)


@given(st.permutations(range(12)), st.integers(0, 12))
def test_map_is_the_inverse_of_what_is_owned(order: list[int], count: int) -> None:
    owned = order[:count]
    table = expert_map(12, owned)
    assert table.dtype == np.int32
    assert [int(table[expert]) for expert in owned] == list(range(count))
    assert (table == -1).sum() == 12 - count


def test_maps_of_all_ranks_place_each_expert_once() -> None:
    maps = np.stack([expert_map(13, owned) for owned in expert_ranges(13, 4)])
    assert ((maps >= 0).sum(axis=0) == 1).all()


def test_what_cannot_be_owned_is_refused() -> None:
    with pytest.raises(PrepValueError, match=r"expert 8 is outside 0\.\.7"):
        expert_map(8, [8])
    with pytest.raises(PrepValueError, match="expert 3 is owned twice: at 0 and at 2"):
        expert_map(8, [3, 4, 3])
    with pytest.raises(PrepValueError, match="at least 1, got 0"):
        expert_map(0, [])
    with pytest.raises(PrepValueError, match="at least 1, got 0"):
        expert_ranges(0, 1)
    for bad in (True, 2.0, "2"):
        with pytest.raises(PrepTypeError, match="must be an int"):
            expert_map(8, [bad])  # type: ignore[list-item]
        with pytest.raises(PrepTypeError, match="world_size must be an int"):
            expert_ranges(8, bad)  # type: ignore[arg-type]
