"""Holds batching to its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_prep import PrepTypeError, PrepValueError, TrellisStaging
from trellis_prep.staging import plan_batches, plan_slots


def test_bound_is_64_experts_and_64_mib_unless_said() -> None:
    assert TrellisStaging() == TrellisStaging(max_experts=64, max_bytes=67_108_864)


@pytest.mark.parametrize("name", ["max_experts", "max_bytes"])
def test_bounds_are_positive_ints(name: str) -> None:
    for bad in (0, -1):
        with pytest.raises(PrepValueError, match=f"{name} must be positive, got {bad}"):
            TrellisStaging(**{name: bad})
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(PrepTypeError, match=f"{name} must be an int, got {type(wrong).__name__}"):
            TrellisStaging(**{name: wrong})


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    max_bytes=st.integers(1, 200),
    max_experts=st.integers(1, 8),
)
def test_batches_are_the_longest_that_fit(sizes: list[int], max_bytes: int, max_experts: int) -> None:
    bounds = TrellisStaging(max_experts=max_experts, max_bytes=max_bytes)
    largest = max(sizes)
    if largest > max_bytes:
        with pytest.raises(PrepValueError, match=rf"{max_bytes} bytes is insufficient.*{largest} bytes"):
            plan_batches(sizes, bounds)
        return
    plan = plan_batches(sizes, bounds)
    assert plan.slots * plan.slot_bytes <= max_bytes
    room = max_bytes // 2 if 2 * largest <= max_bytes else max_bytes
    expert = 0
    for batch in plan.batches:
        assert batch.first == expert < batch.end
        assert batch.nbytes == sum(sizes[batch.first : batch.end]) <= min(room, plan.slot_bytes)
        assert batch.end - batch.first <= max_experts
        full = batch.end == len(sizes) or batch.end - batch.first == max_experts
        assert full or batch.nbytes + sizes[batch.end] > room
        expert = batch.end
    assert expert == len(sizes)


def test_kimi_k3_batches() -> None:
    plan = plan_batches([1_032_192] * 896, TrellisStaging())
    assert plan.slots == 2
    assert plan.slot_bytes == 32 * 1_032_192
    assert len(plan.batches) == 28


@pytest.mark.parametrize(("max_bytes", "slots", "batches"), [(200, 2, 3), (199, 1, 3), (100, 1, 3), (400, 2, 2)])
def test_one_slot_where_two_do_not_fit(max_bytes: int, slots: int, batches: int) -> None:
    plan = plan_batches([100, 100, 100], TrellisStaging(max_bytes=max_bytes))
    assert (plan.slots, len(plan.batches)) == (slots, batches)


def test_no_experts_need_no_slots() -> None:
    plan = plan_batches([], TrellisStaging())
    assert (plan.batches, plan.slots, plan.slot_bytes) == ((), 0, 0)


@given(nbytes=st.integers(1, 5000), max_bytes=st.integers(16, 4000))
def test_slots_for_tables_fit_the_bound(nbytes: int, max_bytes: int) -> None:
    slots, slot_bytes = plan_slots(nbytes, TrellisStaging(max_bytes=max_bytes))
    assert slots in (1, 2)
    assert 0 < slots * slot_bytes <= max_bytes
    assert slot_bytes % 16 == 0
    assert slot_bytes < nbytes + 16, "a slot is no larger than what it moves"
    assert slots == 2 or (slot_bytes >= min(nbytes, 16) and (slot_bytes >= nbytes or max_bytes < 32))


@pytest.mark.parametrize("max_bytes", [1, 15])
def test_bound_below_an_element_is_insufficient(max_bytes: int) -> None:
    with pytest.raises(PrepValueError, match=rf"{max_bytes} bytes is insufficient: .* at least 16 bytes"):
        plan_slots(100, TrellisStaging(max_bytes=max_bytes))
