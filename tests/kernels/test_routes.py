"""Holds the capacity of a packing to its bound: always enough, reached by some routing, and never more."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trellis_kernels import BLOCK_ROWS, KernelTypeError, KernelValueError, route_capacity
from trellis_kernels.routes import empty_routes


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


CPU = torch.device("cpu")


def test_fresh_routes_have_just_the_capacity() -> None:
    fresh = empty_routes(10, 4, 16, CPU)
    sizes = {name: value.numel() for name, value in vars(fresh).items() if isinstance(value, torch.Tensor)}
    assert sizes == {
        "route_indices": 70,
        "block_experts": 5,
        "packed_count": 1,
        "expert_offsets": 5,
        "expert_counts": 4,
    }
    assert empty_routes(3, 4, 16, CPU, fresh) is fresh


@pytest.mark.parametrize(
    ("change", "numbers", "error", "text"),
    [
        ({}, (11, 4, 16), KernelValueError, "11 routes need 71 slots, the arena has 70"),
        ({}, (10, 4, 8), KernelValueError, "the arena has blocks of 16 rows, the packing 8"),
        ({}, (10, 3, 16), KernelValueError, r"expert_offsets must be \[4\], got \[5\]"),
        ({"block_experts": torch.zeros(4).int()}, (10, 4, 16), KernelValueError, r"block_experts must be \[5\]"),
        ({"packed_count": torch.zeros(1)}, (10, 4, 16), KernelTypeError, "packed_count must be torch.int32"),
        (
            {"expert_counts": torch.zeros(8).int()[::2]},
            (10, 4, 16),
            KernelValueError,
            "expert_counts must be contiguous",
        ),
        (
            {"expert_counts": torch.zeros(4, device="meta").int()},
            (10, 4, 16),
            KernelTypeError,
            "must be on cpu, got meta",
        ),
    ],
)
def test_arenas_that_do_not_fit_are_refused(change, numbers, error: type[Exception], text: str) -> None:
    arena = dataclasses.replace(empty_routes(10, 4, 16, CPU), **change)
    with pytest.raises(error, match=text):
        empty_routes(*numbers, CPU, arena)
