"""Holds batching to its bound, and slots to being lent for one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trellis_prep import PrepError, PrepTypeError, PrepValueError, TrellisStaging
from trellis_prep.staging import POISON_BYTE, StagingRing, plan_batches

CPU = torch.device("cpu")


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


def test_slots_are_lent_in_turn_and_poisoned_after() -> None:
    ring = StagingRing(2, 8, device=CPU, poison=True)
    assert ring.nbytes == 16
    target = torch.full((6,), 0xEE, dtype=torch.uint8)
    with ring.lend() as first:
        first[:] = np.arange(8)
        ring.copy(target, 2)
    assert target.tolist() == [2, 3, 4, 5, 6, 7]
    assert (first == POISON_BYTE).all()
    with ring.lend() as second:
        assert not np.shares_memory(first, second)
    with ring.lend() as third:
        assert np.shares_memory(first, third)
    ring.drain()


def test_slot_is_given_back_on_an_error() -> None:
    ring = StagingRing(1, 8, device=CPU)
    with pytest.raises(KeyError), ring.lend():
        raise KeyError
    with ring.lend() as slot:
        assert slot.size == 8


def test_slot_is_lent_once_at_a_time() -> None:
    ring = StagingRing(1, 8, device=CPU)
    with ring.lend(), pytest.raises(PrepError, match="lent once"), ring.lend():
        pass


@pytest.mark.gpu
def test_pinned_slot_is_poisoned_only_after_its_copy() -> None:
    ring = StagingRing(2, 1 << 24, device=torch.device("cuda", 0), poison=True)
    targets = [torch.zeros(1 << 24, dtype=torch.uint8, device="cuda") for _ in range(6)]
    for number, target in enumerate(targets):
        with ring.lend() as slot:
            slot.fill(number + 1)
            ring.copy(target, 0)
    ring.drain()
    assert [target.unique().tolist() for target in targets] == [[number + 1] for number in range(6)]
