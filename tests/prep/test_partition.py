"""Holds the planners with barriers to their rules, and to the published shares of Kimi-K3."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.extent import TrellisExtent
from trellis_prep import PrepTypeError, PrepValueError, balanced_extents, check_extent, even_extents, partition_extents
from trellis_prep.partition import rotation_step

K3 = 3072  # channels: 96 slots, 24 blocks, one barrier in the middle
K3_LAYERS = 92


def slots_of(extents: tuple[TrellisExtent, ...]) -> list[int]:
    return [extent.slot_count for extent in extents]


@pytest.mark.parametrize(
    ("world", "partition", "balanced"),
    [
        (8, [12] * 8, [12] * 8),
        (9, [12, 12, 8, 8, 8] + [12] * 4, [12, 12, 8, 8, 8] + [12] * 4),
        (10, [8] * 6 + [12] * 4, [12, 12, 8, 8, 8] * 2),
        (12, [8] * 12, [8] * 12),
        (16, [8, 8] + [4] * 8 + [8] * 6, ([8] * 4 + [4] * 4) * 2),
        (24, [4] * 24, [4] * 24),
    ],
)
def test_kimi_k3_shares(world: int, partition: list[int], balanced: list[int]) -> None:
    assert slots_of(partition_extents(K3, world, barriers=[48])) == partition
    assert slots_of(balanced_extents(K3, world)) == balanced


@pytest.mark.parametrize(
    ("world", "held"),
    [(8, {1104}), (9, {976, 980, 984}), (10, {880, 884}), (12, {736}), (16, set(range(544, 561, 4))), (24, {368})],
)
def test_kimi_k3_rotates_to_about_the_same_for_all(world: int, held: set[int]) -> None:
    layers = [slots_of(balanced_extents(K3, world, layer)) for layer in range(K3_LAYERS)]
    totals = {sum(layer[rank] for layer in layers) for rank in range(world)}
    assert totals <= held
    assert {min(totals), max(totals)} == {min(held), max(held)}


def test_kimi_k3_planners_agree_except_where_they_do_not() -> None:
    apart = [
        world for world in range(2, 25) if partition_extents(K3, world, barriers=[48]) != balanced_extents(K3, world)
    ]
    assert apart == [10, *range(14, 23)]


def test_rotation_moves_each_share_to_the_rank_before() -> None:
    ordered = balanced_extents(K3, 9)
    for layer in range(20):
        assert balanced_extents(K3, 9, layer) == tuple(ordered[(rank + layer) % 9] for rank in range(9))
    ten = balanced_extents(K3, 10)
    assert balanced_extents(K3, 10, 1) == ten[2:] + ten[:2]
    assert [rotation_step(world) for world in (9, 10, 11)] == [1, 2, 1]


def test_records_of_256_channels() -> None:
    assert [extent.width for extent in partition_extents(2304, 2, alignment_slots=8)] == [1280, 1024]


@pytest.mark.parametrize("blocks", [6, 11, 16])
def test_without_barriers_it_is_the_even_share(blocks: int) -> None:
    for world in range(1, blocks + 1):
        assert partition_extents(blocks * 128, world) == even_extents(blocks * 128, world)


@given(st.data())
def test_shares_cover_every_slot_once_and_cross_nothing(data: st.DataObject) -> None:
    alignment = data.draw(st.sampled_from([1, 4, 8]))
    units = data.draw(st.integers(1, 24))
    barriers = sorted(data.draw(st.sets(st.integers(1, units - 1), max_size=4)) if units > 1 else [])
    world = data.draw(st.integers(len(barriers) + 1, units))
    cuts = [barrier * alignment for barrier in barriers]
    extents = partition_extents(units * alignment * 32, world, alignment_slots=alignment, barriers=cuts)
    hits = np.zeros(units * alignment, dtype=int)
    for extent in extents:
        check_extent(extent, alignment_slots=alignment, barriers=cuts)
        assert extent.slot_count > 0
        hits[extent.first_slot : extent.first_slot + extent.slot_count] += 1
    assert (hits == 1).all()
    assert len(extents) == world


@given(st.data())
def test_balanced_shares_cover_every_slot_once(data: st.DataObject) -> None:
    half = data.draw(st.integers(1, 16))
    world = data.draw(st.integers(2, 2 * half))
    layer = data.draw(st.integers(0, 200))
    extents = balanced_extents(half * 256, world, layer)
    hits = np.zeros(half * 8, dtype=int)
    for extent in extents:
        check_extent(extent, barriers=[half * 4])
        hits[extent.first_slot : extent.first_slot + extent.slot_count] += 1
    assert (hits == 1).all()
    assert sorted(extents, key=lambda extent: extent.first_slot) == list(balanced_extents(half * 256, world))


@pytest.mark.parametrize(
    ("world", "barriers", "bounds"),
    [(25, [48], "2 to 24"), (1, [48], "2 to 24"), (0, [], "1 to 24"), (2, [8, 48], "3 to 24")],
)
def test_partition_names_both_bounds(world: int, barriers: list[int], bounds: str) -> None:
    with pytest.raises(PrepValueError, match=rf"^{world} ranks .*{bounds}$"):
        partition_extents(K3, world, barriers=barriers)


@pytest.mark.parametrize("world", [0, 1, 25])
def test_balanced_names_both_bounds(world: int) -> None:
    with pytest.raises(PrepValueError, match=rf"^{world} ranks .*2 to 24$"):
        balanced_extents(K3, world)


@pytest.mark.parametrize("barriers", [[0], [96], [-4], [46], [100]])
def test_barrier_off_the_grain_is_refused(barriers: list[int]) -> None:
    with pytest.raises(PrepValueError, match=rf"barrier at slot {barriers[0]} .* 4 slots inside 0\.\.96"):
        partition_extents(K3, 4, barriers=barriers)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PrepValueError, match="name a slot twice"):
        partition_extents(K3, 4, barriers=[48, 48])
    with pytest.raises(PrepValueError, match="1408 channels is not a multiple of 256; nearest: 1536"):
        balanced_extents(1408, 2)
    with pytest.raises(PrepValueError, match="alignment must be at least 1"):
        partition_extents(K3, 4, alignment_slots=0)
    with pytest.raises(PrepValueError, match="layer position must be 0 or more, got -1"):
        balanced_extents(K3, 4, -1)
    for arguments in ((K3, True), (K3, 2.0), ("3072", 2)):
        with pytest.raises(PrepTypeError, match="must be an int"):
            partition_extents(*arguments)  # type: ignore[arg-type]
        with pytest.raises(PrepTypeError, match="must be an int"):
            balanced_extents(*arguments)  # type: ignore[arg-type]
