"""Holds the capacity of a packing to its bound: always enough, reached by some routing, and never more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_kernels import BLOCK_ROWS, KernelValueError, route_capacity


def padded_total(counts: list[int], block_rows: int) -> int:
    return sum(-(-count // block_rows) * block_rows for count in counts)


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    dropped=st.integers(0, 5),
    block_rows=st.sampled_from(BLOCK_ROWS),
)
def test_capacity_suffices(counts: list[int], dropped: int, block_rows: int) -> None:
    assert padded_total(counts, block_rows) <= route_capacity(sum(counts) + dropped, len(counts), block_rows)


@given(experts=st.integers(1, 20), full=st.integers(0, 3), block_rows=st.sampled_from(BLOCK_ROWS))
def test_some_routing_takes_all_of_it(experts: int, full: int, block_rows: int) -> None:
    counts = [full * block_rows + 1] * experts  # one row into a block is the most padding there can be
    assert padded_total(counts, block_rows) == route_capacity(sum(counts), experts, block_rows)


@pytest.mark.parametrize("block_rows", BLOCK_ROWS)
def test_fewer_routes_than_experts_take_a_block_each(block_rows: int) -> None:
    assert route_capacity(0, 896, block_rows) == 0
    assert route_capacity(1, 896, block_rows) == block_rows
    assert route_capacity(16, 896, block_rows) == 16 * block_rows


def test_known_capacity() -> None:
    assert route_capacity(4096 * 16, 896, 64) == 121_984


@pytest.mark.parametrize(
    ("routes", "experts", "block_rows", "text"),
    [(8, 4, 24, "24 is not one of 8, 16, 32"), (-1, 4, 8, "-1 routes"), (8, 0, 8, "0 experts")],
)
def test_illegal_numbers_are_refused(routes: int, experts: int, block_rows: int, text: str) -> None:
    with pytest.raises(KernelValueError, match=text):
        route_capacity(routes, experts, block_rows)
