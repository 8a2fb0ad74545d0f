"""Holds parts of arrays to numpy's slices, and to leaving the whole where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl3_files import write_shard
from trellis_format.errors import FormatValueError
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.files.boxes import BoxArray, take_box
from trellis_format.files.layer_file import LayerFile

SHAPE = (5, 6, 7)
WHOLE = np.arange(5 * 6 * 7, dtype=np.int16).reshape(SHAPE)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    parts = []
    for size in shape:
        start = draw(st.integers(0, size))
        parts.append(slice(start, draw(st.integers(start, size))))
    return tuple(parts)


def read_box(array: ArrayView, box: tuple[slice, ...]) -> np.ndarray:
    lengths = array.box_shape(box)
    out = np.full(int(np.prod(lengths)) * array.dtype.itemsize, 0xA5, dtype=np.uint8)
    array.read_box(box, out)
    return out.view(array.dtype).reshape(lengths)


@given(st.data())
def test_a_box_of_a_box_is_a_slice_of_a_slice(data: st.DataObject) -> None:
    outer = data.draw(boxes(SHAPE))
    part = BoxArray(MemoryArray(WHOLE), outer)
    expected = WHOLE[outer]
    assert part.shape == expected.shape
    assert part.nbytes == expected.nbytes
    assert np.array_equal(part.read(), expected)
    inner = data.draw(boxes(expected.shape))
    assert np.array_equal(read_box(part, inner), expected[inner])
    assert np.array_equal(take_box(part, inner).read(), expected[inner])


def test_a_part_in_memory_is_the_same_storage() -> None:
    part = take_box(MemoryArray(WHOLE), (slice(0, 5), slice(0, 4), slice(0, 7)))
    assert isinstance(part, MemoryArray)
    assert part.read().ctypes.data == WHOLE.ctypes.data
    assert np.shares_memory(part.read(), WHOLE)


def test_a_part_of_a_file_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    with LayerFile(write_shard(tmp_path / "a.safetensors", {"x": WHOLE, "y": WHOLE})) as file:
        part = take_box(file.tensors["x"], (slice(1, 3), slice(2, 4), slice(0, 7)))
        assert isinstance(part, BoxArray)
        assert file.bytes_read == 0
        assert np.array_equal(part.read(), WHOLE[1:3, 2:4])
        assert file.bytes_read == 2 * 2 * 7 * 2


@pytest.mark.parametrize(
    "box", [(slice(0, 6), slice(0, 6), slice(0, 7)), (slice(0, 5), slice(0, 6)), (slice(0, 5, 2), slice(0), slice(0))]
)
@pytest.mark.parametrize("make", [BoxArray, take_box])
def test_boxes_outside_are_refused(make: type[BoxArray], box: tuple[slice, ...]) -> None:
    with pytest.raises(FormatValueError, match="box"):
        make(MemoryArray(WHOLE), box)
    part = BoxArray(MemoryArray(WHOLE), (slice(0, 2), slice(0, 2), slice(0, 2)))
    with pytest.raises(FormatValueError, match="box"):
        read_box(part, (slice(0, 3), slice(0, 2), slice(0, 2)))


def test_buffers_of_another_size_are_refused() -> None:
    part = BoxArray(MemoryArray(WHOLE), (slice(0, 2), slice(0, 2), slice(0, 2)))
    with pytest.raises(FormatValueError, match="buffer must be 16 contiguous uint8"):
        part.read_box((slice(0, 2), slice(0, 2), slice(0, 2)), np.empty(15, np.uint8))


def test_runs_of_a_part_are_those_of_its_bytes_in_the_file(tmp_path: Path) -> None:
    assert BoxArray(MemoryArray(WHOLE), (slice(1, 3), slice(0, 6), slice(0, 7))).runs((slice(0, 1),) * 3) is None
    with LayerFile(write_shard(tmp_path / "a.safetensors", {"x": WHOLE})) as file:
        part = take_box(file.tensors["x"], (slice(1, 4), slice(2, 5), slice(0, 7)))
        runs = part.runs((slice(1, 3), slice(0, 2), slice(0, 7)))
        assert runs is not None
        places = [file.tensors["x"].entry.begin + 14 * (6 * row + 2) for row in (2, 3)]
        assert (runs.begin + runs.places).tolist() == places
        assert (runs.length, runs.nbytes, runs.tensor) == (28, 56, "x")
