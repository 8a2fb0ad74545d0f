"""Holds the cuts of a container to alignment, barriers, pairs and blocks, against a search over all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_files import edited, head_of, manifest_json
from trellis_format.container.extents import check_extent, extent_alignment, nearest_extents, whole_extent
from trellis_format.container.manifest import parse_manifest
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent


def slots(first: int, count: int, axis: int = 3072) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=axis, first_slot=first, slot_count=count)


@pytest.mark.parametrize(("first", "count"), [(0, 8), (8, 4), (48, 12), (60, 8), (0, 96), (92, 4)])
def test_aligned_extents_are_legal(first: int, count: int) -> None:
    check_extent(head_of(), slots(first, count))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"alignment": 4}, 4),
        ({"alignment": 1}, 1),
        ({"alignment": 6}, 6),
        ({"alignment": 3, "kinds": ("P33",)}, 24),
        ({"alignment": 1, "transform": True}, 4),
        ({"alignment": 6, "transform": True}, 12),
    ],
)
def test_alignment_is_that_of_layout_pairs_and_blocks(changes: dict[str, object], expected: int) -> None:
    assert extent_alignment(head_of(**changes)) == expected


@pytest.mark.parametrize(
    ("first", "count", "text"),
    [
        (2, 8, r"first slot 2, count 8: both must be multiples of the alignment of 4 slots; .*: first 0 count 12"),
        (0, 6, r"first slot 0, count 6: both must be multiples .*: first 0 count 8"),
        (94, 2, r"first slot 94, count 2: .*: first 92 count 4"),
        (8, 0, r"first slot 8, count 0: it is empty; nearest legal: first 8 count 4"),
    ],
)
def test_others_are_refused_with_the_nearest(first: int, count: int, text: str) -> None:
    with pytest.raises(FormatValueError, match=rf"^extent of {text}$"):
        check_extent(head_of(), slots(first, count))


def test_barriers_may_be_touched_but_not_crossed() -> None:
    head = parse_manifest(edited(manifest_json(), "layout.extent_barriers", [48, 24]))
    for first, count in ((0, 24), (24, 24), (48, 48), (20, 4)):
        check_extent(head, slots(first, count))
    with pytest.raises(FormatValueError) as caught:
        check_extent(head, slots(20, 32))
    assert str(caught.value) == (
        "extent of first slot 20, count 32: the barrier at slot 24 lies inside; nearest legal: first 20 count 4, "
        "first 24 count 24, first 48 count 4"
    )


def test_the_half_of_a_transformed_layer_is_a_barrier() -> None:
    head = head_of(codebook="lut_e4m3", bits=2, transform=True)
    check_extent(head, slots(44, 4))
    with pytest.raises(FormatValueError, match="the barrier at slot 48 lies inside"):
        check_extent(head, whole_extent(head))


def test_an_extent_of_another_axis_is_refused() -> None:
    with pytest.raises(FormatValueError, match="axis of 1024 channels, the container of one of 3072"):
        check_extent(head_of(), slots(0, 8, 1024))


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.lists(st.integers(1, 23), unique=True, max_size=3),
    st.integers(0, 23),
    st.integers(0, 24),
)
def test_what_is_refused_is_covered_by_legal_ones(alignment: int, barriers: list[int], first: int, count: int) -> None:
    count = min(count, 24 - first)
    data = manifest_json(intermediate=768, alignment=alignment)
    head = parse_manifest(edited(data, "layout.extent_barriers", barriers))
    legal = (
        count > 0
        and first % alignment == 0
        and count % alignment == 0
        and not any(first < barrier < first + count for barrier in barriers)
    )
    if legal:
        check_extent(head, slots(first, count, 768))
        return
    with pytest.raises(FormatValueError, match="nearest legal: first"):
        check_extent(head, slots(first, count, 768))
    near = nearest_extents(head, slots(first, count, 768))
    assert near[0][0] <= first
    assert near[-1][1] >= first + count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(near))
    if all(barrier % alignment == 0 for barrier in barriers):
        for low, high in near:
            check_extent(head, slots(low, high - low, 768))
