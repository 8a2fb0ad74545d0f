"""Holds batching to its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_prep import PrepTypeError, PrepValueError, TrellisStaging
from trellis_prep.staging import SLOTS_PER_READER, plan_batches, plan_slots


def test_bound_is_64_experts_and_64_mib_unless_said() -> None:
    assert TrellisStaging() == TrellisStaging(max_experts=64, max_bytes=67_108_864, readers=None)


@pytest.mark.parametrize("name", ["max_experts", "max_bytes", "readers"])
def test_bounds_are_positive_ints(name: str) -> None:
    for bad in (0, -1):
        with pytest.raises(PrepValueError, match=f"{name} must be positive, got {bad}"):
            TrellisStaging(**{name: bad})
    for wrong in (True, 1.0, "1", *([] if name == "readers" else [None])):
        with pytest.raises(PrepTypeError, match=f"{name} must be an int, got {type(wrong).__name__}"):
            TrellisStaging(**{name: wrong})


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Rows of tiles of each projection, and bytes of a row of each linear."""
    rows = draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))
    sizes = st.lists(st.integers(1, 20), min_size=len(rows), max_size=len(rows))
    return rows, draw(st.lists(sizes, min_size=1, max_size=12))


@given(layer=layers(), max_bytes=st.integers(1, 500), max_experts=st.integers(1, 8), readers=st.integers(1, 5))
def test_batches_hold_every_row_once_in_order_and_within_the_bound(
    layer: tuple[list[int], list[list[int]]], max_bytes: int, max_experts: int, readers: int
) -> None:
    rows, row_bytes = layer
    sizes = [sum(count * size for count, size in zip(rows, each, strict=True)) for each in row_bytes]
    bounds = TrellisStaging(max_experts=max_experts, max_bytes=max_bytes)
    if max(sizes) > max_bytes:
        with pytest.raises(PrepValueError, match=rf"{max_bytes} bytes is insufficient.*{max(sizes)} bytes"):
            plan_batches(rows, row_bytes, bounds)
        return
    plan = plan_batches(rows, row_bytes, bounds, readers=readers)
    assert plan.slots * plan.slot_bytes <= max_bytes
    assert plan.slots <= SLOTS_PER_READER * readers
    assert plan.slot_bytes == max(batch.nbytes for batch in plan.batches)
    seen: list[tuple[int, int, int]] = []
    for batch in plan.batches:
        assert batch.end - batch.first <= max_experts
        parts = [(0, count) for count in rows] if batch.parts is None else batch.parts
        assert batch.parts is None or batch.end == batch.first + 1
        places = [
            (expert, projection, row)
            for expert in range(batch.first, batch.end)
            for projection, (first, end) in enumerate(parts)
            for row in range(first, end)
        ]
        assert batch.nbytes == sum(row_bytes[expert][projection] for expert, projection, _ in places) > 0
        seen += places
    every = [(e, p, r) for e in range(len(row_bytes)) for p in range(len(rows)) for r in range(rows[p])]
    assert seen == every, "each row once, experts in order, and within one its projections and rows"


@given(layer=layers(), max_bytes=st.integers(1, 500))
def test_whole_experts_are_the_most_that_fit(layer: tuple[list[int], list[list[int]]], max_bytes: int) -> None:
    rows, row_bytes = layer
    sizes = [sum(count * size for count, size in zip(rows, each, strict=True)) for each in row_bytes]
    if max(sizes) > max_bytes:
        return
    plan = plan_batches(rows, row_bytes, TrellisStaging(max_bytes=max_bytes), readers=2)
    slots = next(n for n in (4, 3, 2, 1) if n == 1 or max_bytes // n >= max(map(max, row_bytes)))
    room = max_bytes // (3 if slots == 4 and max_bytes // 4 < max(sizes) <= max_bytes // 3 else slots)
    for batch in plan.batches:
        if batch.parts is None and batch.end < len(sizes):
            assert batch.nbytes + sizes[batch.end] > room
        if batch.parts is not None:
            assert sizes[batch.first] > room, "only an expert larger than a slot is cut"


def test_kimi_k3_batches() -> None:
    plan = plan_batches([224, 224, 24], [[24 * 64, 24 * 64, 224 * 64]] * 896, TrellisStaging())
    assert plan.slots == 2
    assert plan.slot_bytes == 32 * 1_032_192
    assert len(plan.batches) == 28


def test_expert_larger_than_a_slot_is_cut_evenly() -> None:
    plan = plan_batches([10, 10, 10], [[10, 10, 10]], TrellisStaging(max_bytes=400), readers=2)
    assert [(batch.nbytes, batch.parts) for batch in plan.batches] == [
        (100, ((0, 10), (0, 0), (0, 0))),
        (100, ((10, 10), (0, 10), (0, 0))),
        (100, ((10, 10), (10, 10), (0, 10))),
    ]
    plan = plan_batches([10, 10, 10], [[10, 10, 10]], TrellisStaging(max_bytes=320), readers=2)
    assert [batch.nbytes for batch in plan.batches] == [80, 80, 80, 60]
    assert plan.batches[1].parts == ((8, 10), (0, 6), (0, 0))


@pytest.mark.parametrize(
    ("max_bytes", "slots", "batches"),
    [(400, 3, 3), (1200, 1, 1), (300, 3, 3), (299, 4, 6), (199, 3, 6), (149, 2, 6), (100, 2, 6)],
)
def test_slots_are_fewer_where_a_row_would_not_fit(max_bytes: int, slots: int, batches: int) -> None:
    plan = plan_batches([2], [[50]] * 3, TrellisStaging(max_bytes=max_bytes), readers=2)
    assert (plan.slots, len(plan.batches)) == (slots, batches)


def test_one_slot_where_it_holds_one_row() -> None:
    plan = plan_batches([1], [[50]] * 3, TrellisStaging(max_bytes=99))
    assert (plan.slots, plan.slot_bytes, len(plan.batches)) == (1, 50, 3)


def test_no_experts_need_no_slots() -> None:
    plan = plan_batches([1, 1], [], TrellisStaging())
    assert (plan.batches, plan.slots, plan.slot_bytes) == ((), 0, 0)


@given(nbytes=st.integers(1, 5000), max_bytes=st.integers(16, 4000))
def test_slots_for_tables_fit_the_bound(nbytes: int, max_bytes: int) -> None:
    slots, slot_bytes = plan_slots(nbytes, TrellisStaging(max_bytes=max_bytes))
    assert 1 <= slots <= SLOTS_PER_READER
    assert 0 < slots * slot_bytes <= max_bytes
    assert slot_bytes % 16 == 0
    assert slot_bytes < nbytes + 16, "a slot is no larger than what it moves"
    assert (slots - 1) * slot_bytes < nbytes, "no slot is more than what there is to move"


@pytest.mark.parametrize("max_bytes", [1, 15])
def test_bound_below_an_element_is_insufficient(max_bytes: int) -> None:
    with pytest.raises(PrepValueError, match=rf"{max_bytes} bytes is insufficient: .* at least 16 bytes"):
        plan_slots(100, TrellisStaging(max_bytes=max_bytes))


@given(layer=layers(), max_bytes=st.integers(1, 900), max_experts=st.integers(1, 8), slots=st.integers(2, 9))
def test_batches_of_large_linears_are_of_one_projection(
    layer: tuple[list[int], list[list[int]]], max_bytes: int, max_experts: int, slots: int
) -> None:
    rows, row_bytes = layer
    largest = max(count * size for sizes in row_bytes for count, size in zip(rows, sizes, strict=True))
    bounds = TrellisStaging(max_experts=max_experts, max_bytes=max_bytes)
    if max(sum(count * size for count, size in zip(rows, sizes, strict=True)) for sizes in row_bytes) > max_bytes:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trellis_prep.staging.LARGE_LINEAR", 30)
        plan = plan_batches(rows, row_bytes, bounds, slots=slots)
    assert plan.slots * plan.slot_bytes <= max_bytes
    assert plan.slots <= slots
    assert plan.slot_bytes == max(batch.nbytes for batch in plan.batches)
    seen = []
    for batch in plan.batches:
        assert batch.end - batch.first <= max_experts
        parts = [(0, count) for count in rows] if batch.parts is None else batch.parts
        places = [
            (expert, projection, row)
            for projection, (first, end) in enumerate(parts)
            for expert in range(batch.first, batch.end)
            for row in range(first, end)
        ]
        assert batch.nbytes == sum(row_bytes[expert][projection] for expert, projection, _ in places) > 0
        if 30 <= largest <= max_bytes // 4:
            assert len({projection for _, projection, _ in places}) == 1
        seen += places
    every = [(e, p, r) for e in range(len(row_bytes)) for p in range(len(rows)) for r in range(rows[p])]
    assert sorted(seen) == every, "each row once"


def test_slots_of_the_1_gb_layer() -> None:
    rows, row_bytes = [256, 256, 88], [[11264, 11264, 32768]] * 128
    for mib, slots, linears in ((64, 7, 3), (32, 5, 1), (16, 5, 1), (128, 6, 7)):
        plan = plan_batches(rows, row_bytes, TrellisStaging(max_bytes=mib << 20), slots=8)
        assert (plan.slots >= slots, plan.slot_bytes) == (True, linears * 2_883_584)
        assert all(batch.parts is not None for batch in plan.batches)
    few = plan_batches(rows, row_bytes, TrellisStaging(max_bytes=10 << 20), slots=8)
    assert [batch.end - batch.first for batch in few.batches] == [1] * len(few.batches), "parts of one expert"
    assert few.batches[1].first == 0, "the next part"
