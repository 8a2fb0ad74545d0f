"""Holds the extent to its ranges, and its refusals to what they must say."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import BLOCK, BLOCK_SLOTS, SLOT, TrellisExtent


def extent(size: int, first: int, count: int) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=size, first_slot=first, slot_count=count)


def test_a_block_is_four_slots_of_32_channels() -> None:
    assert (SLOT, BLOCK, BLOCK_SLOTS) == (32, 128, 4)


@given(st.integers(1, 200), st.data())
def test_every_range_inside_the_axis_slices_it(slots: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, slots))
    count = data.draw(st.integers(0, slots - first))
    part = extent(32 * slots, first, count)
    axis = np.arange(32 * slots)
    assert axis[part.channels].tolist() == list(range(32 * first, 32 * (first + count)))
    assert np.array_equal(axis.reshape(-1, 16)[part.tiles].reshape(-1), axis[part.channels])
    assert (part.first_channel, part.width, part.end_channel) == (32 * first, 32 * count, 32 * (first + count))
    assert part.is_whole == (count == slots)
    assert eval(repr(part)) == part


@given(st.integers(-100, 5000), st.integers(-3, 100), st.integers(-3, 100))
def test_a_range_is_taken_exactly_when_it_is_inside(size: int, first: int, count: int) -> None:
    legal = size > 0 and size % 32 == 0 and first >= 0 and count >= 0 and 32 * (first + count) <= size
    if legal:
        assert extent(size, first, count).width == 32 * count
    else:
        with pytest.raises(FormatValueError, match="extent"):
            extent(size, first, count)


@pytest.mark.parametrize("size", [0, -32, 31, 100])
def test_the_axis_is_a_positive_multiple_of_a_slot(size: int) -> None:
    with pytest.raises(FormatValueError, match=f"extent over {size} channels: .* positive multiple of 32"):
        extent(size, 0, 0)


def test_a_range_outside_names_both_ends() -> None:
    with pytest.raises(FormatValueError, match=r"slots 10\.\.14 is outside the axis of 12 slots \(384 channels\)"):
        extent(384, 10, 4)


@pytest.mark.parametrize("field", ["global_intermediate_size", "first_slot", "slot_count"])
@pytest.mark.parametrize("value", [True, 4.0, "4", None, np.int64(4)])
def test_fields_are_python_ints(field: str, value: object) -> None:
    arguments = {"global_intermediate_size": 384, "first_slot": 0, "slot_count": 4} | {field: value}
    with pytest.raises(FormatTypeError, match=f"extent {field} must be an int, got {type(value).__name__}"):
        TrellisExtent(**arguments)  # type: ignore[arg-type]


def test_fields_are_named_and_fixed() -> None:
    with pytest.raises(TypeError):
        TrellisExtent(384, 0, 4)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        extent(384, 0, 4).first_slot = 4  # type: ignore[misc]


@pytest.mark.parametrize("size", [32, 128, 768, 2944])
def test_whole_covers_the_axis(size: int) -> None:
    whole = TrellisExtent.whole(size)
    assert whole.is_whole
    assert (whole.first_channel, whole.end_channel) == (0, size)


@pytest.mark.parametrize("size", [0, -128, 100])
def test_whole_of_an_illegal_axis_is_refused(size: int) -> None:
    with pytest.raises(FormatValueError, match=f"extent over {size} channels"):
        TrellisExtent.whole(size)


@given(st.integers(1, 24), st.data())
def test_blocks_are_kept_exactly_when_both_ends_are_multiples_of_128(blocks: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 4 * blocks))
    count = data.draw(st.integers(0, 4 * blocks - first))
    part = extent(128 * blocks, first, count)
    if first % 4 == 0 and count % 4 == 0:
        part.check_blocks()
    else:
        with pytest.raises(FormatValueError, match="128") as caught:
            part.check_blocks()
        low, high = map(int, str(caught.value).rpartition(": ")[2].split(".."))
        assert low % 128 == high % 128 == 0
        assert low <= part.first_channel <= part.end_channel <= high <= 128 * blocks
        assert part.first_channel - low < 128
        assert high - part.end_channel < 128


def test_a_cut_block_names_the_range_and_the_nearest() -> None:
    with pytest.raises(
        FormatValueError, match=r"channels 160\.\.288 cuts a Hadamard block of 128; nearest legal extent: 128\.\.384"
    ):
        extent(768, 5, 4).check_blocks()
