"""Holds reads by position to numpy slicing, and to a file that changes under the reader."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3_files import Raw, write_shard
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import ArrayView, FileArray, MemoryArray, ShardReader
from trellis_format.files.header import read_header

DTYPES = (
    "uint8",
    "int8",
    "bool",
    "int16",
    "uint16",
    "float16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "uint64",
    "float64",
)


def opened(path: Path) -> tuple[ShardReader, dict[str, FileArray]]:
    reader = ShardReader(read_header(path))
    return reader, {name: FileArray(reader, entry) for name, entry in reader.header.entries.items()}


def shard(folder: Path, **arrays: np.ndarray | Raw) -> tuple[ShardReader, dict[str, FileArray]]:
    return opened(write_shard(folder / "x.safetensors", arrays))


def poisoned(nbytes: int) -> np.ndarray:
    return np.full(nbytes, 0xA5, np.uint8)


def read_box(view: ArrayView, box: tuple[slice, ...]) -> np.ndarray:
    lengths = view.box_shape(box)
    nbytes = int(np.prod(lengths, dtype=np.int64)) * view.dtype.itemsize
    guarded = poisoned(nbytes + 32)
    view.read_box(box, guarded[16 : 16 + nbytes])
    assert (guarded[:16] == 0xA5).all()
    assert (guarded[16 + nbytes :] == 0xA5).all()
    return guarded[16 : 16 + nbytes].copy().view(view.dtype).reshape(lengths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_back(tmp_path: Path, dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    reader, tensors = shard(tmp_path, pad=np.zeros(3, np.uint8), a=array, scalar=array[0, 0])
    for name, expected in (("a", array), ("scalar", array[0, 0])):
        found = tensors[name].read()
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert np.array_equal(found, expected)
        assert tensors[name].nbytes == expected.nbytes
    assert reader.bytes_read == array.nbytes + array.dtype.itemsize


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(["uint8", "int16", "float64"]))
    array = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).astype(dtype).reshape(shape)
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        whole = draw(st.booleans())
        box.append(slice(None) if whole else slice(start, stop))
    return array, tuple(box)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(case=boxes())
def test_a_box_is_what_numpy_slices(tmp_path: Path, case: tuple[np.ndarray, tuple[slice, ...]]) -> None:
    array, box = case
    reader, tensors = shard(tmp_path, before=np.zeros(5, np.uint8), a=array, after=np.ones(7, np.uint8))
    for view in (tensors["a"], MemoryArray(array)):
        assert view.box_shape(box) == array[box].shape
        assert np.array_equal(read_box(view, box), array[box])
    assert reader.bytes_read == array[box].nbytes, "a box reads its own bytes alone"
    reader.close()


def test_contiguous_boxes_take_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(4 * 6 * 8, dtype=np.int16).reshape(4, 6, 8)
    _, tensors = shard(tmp_path, a=array)
    calls: list[int] = []
    real = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    for box, reads in (
        ((slice(None), slice(None), slice(None)), 1),
        ((slice(1, 3), slice(None), slice(None)), 1),
        ((slice(2, 3), slice(1, 5), slice(None)), 1),
        ((slice(0, 3), slice(1, 5), slice(None)), 3),
        ((slice(0, 2), slice(1, 4), slice(2, 5)), 6),
        ((slice(0, 0), slice(None), slice(None)), 0),
    ):
        calls.clear()
        assert np.array_equal(read_box(tensors["a"], box), array[box])
        assert len(calls) == reads


def test_runs_of_a_box_are_continued_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(5 * 12, dtype=np.int16).reshape(5, 12)
    reader, tensors = shard(tmp_path, a=array)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:3]], offset))
    box = (slice(1, 4), slice(2, 9))
    assert np.array_equal(read_box(tensors["a"], box), array[box])
    assert reader.bytes_read == array[box].nbytes


def test_a_run_past_the_end_names_its_place(tmp_path: Path) -> None:
    array = np.arange(4 * 6, dtype=np.int16).reshape(4, 6)
    reader, tensors = shard(tmp_path, a=array)
    reader.descriptor()  # the identity of the file is checked before it is cut
    os.truncate(reader.header.path, reader.header.path.stat().st_size - 3)
    begin = tensors["a"].entry.begin + 3 * 12
    with pytest.raises(FormatValueError, match=f"truncated: 6 bytes wanted at byte {begin + 6}, 3 read"):
        read_box(tensors["a"], (slice(0, 4), slice(3, 6)))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1000, dtype=np.int16)
    _, tensors = shard(tmp_path, a=array)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    assert np.array_equal(tensors["a"].read(), array)


@pytest.mark.parametrize(
    ("box", "text"),
    [
        ((slice(0, 2),), "box has 1 axes, the array 2"),
        ((slice(0, 5), slice(None)), "is outside an axis of 4"),
        ((slice(-1, 2), slice(None)), "is outside an axis of 4"),
        ((slice(3, 1), slice(None)), "is outside an axis of 4"),
        ((slice(0, 4, 2), slice(None)), "is outside an axis of 4"),
        ((slice(None), slice(0, 4)), "is outside an axis of 3"),
    ],
)
def test_boxes_outside_the_array_are_refused(tmp_path: Path, box: tuple[slice, ...], text: str) -> None:
    array = np.zeros((4, 3), np.int16)
    reader, tensors = shard(tmp_path, a=array)
    for view in (tensors["a"], MemoryArray(array)):
        with pytest.raises(FormatValueError, match=text):
            view.read_box(box, poisoned(24))
    assert reader.bytes_read == 0


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(11, np.uint8),
        np.zeros(13, np.uint8),
        np.zeros(6, np.int16),
        np.zeros((2, 6), np.uint8),
        np.zeros(24, np.uint8)[::2],
    ],
)
def test_the_buffer_is_exactly_the_bytes(tmp_path: Path, out: np.ndarray) -> None:
    array = np.ones((4, 3), np.int16)
    _, tensors = shard(tmp_path, a=array)
    for view in (tensors["a"], MemoryArray(array)):
        with pytest.raises(FormatValueError, match="buffer must be 12 contiguous uint8"):
            view.read_box((slice(1, 3), slice(None)), out)
    assert not out.any()


def test_memory_is_shared_and_file_reads_are_fresh(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int16)
    assert MemoryArray(array).read() is array
    _, tensors = shard(tmp_path, a=array)
    first = tensors["a"].read()
    first[:] = 0
    assert np.array_equal(tensors["a"].read(), array)


def test_strided_memory_is_read_in_row_major_order() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)[::-1, ::2]
    box = (slice(1, 3), slice(0, 2))
    assert np.array_equal(read_box(MemoryArray(array), box), array[box])


@pytest.mark.parametrize(("dtype", "nbytes"), [("BF16", 12), ("F8_E4M3", 6), ("F4", 3), ("C64", 48)])
def test_dtypes_that_numpy_lacks_are_described_and_not_read(tmp_path: Path, dtype: str, nbytes: int) -> None:
    reader, tensors = shard(tmp_path, a=Raw(dtype, (2, 3), bytes(nbytes)))
    view = tensors["a"]
    assert (view.shape, view.nbytes) == ((2, 3), nbytes)
    with pytest.raises(FormatTypeError, match=f"a: dtype {dtype} has no numpy type"):
        view.read()
    with pytest.raises(FormatTypeError, match=f"dtype {dtype} has no numpy type"):
        view.read_box((slice(None), slice(None)), poisoned(nbytes))
    assert reader.bytes_read == 0


def test_a_file_replaced_between_header_and_read_is_noticed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.safetensors", {"a": np.arange(8, dtype=np.int16)})
    _, tensors = opened(path)
    path.unlink()
    write_shard(path, {"a": np.arange(8, 16, dtype=np.int16)})
    with pytest.raises(FormatValueError, match=r"x\.safetensors: the file changed after its header was read"):
        tensors["a"].read()


def test_a_file_rewritten_in_place_is_noticed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.safetensors", {"a": np.arange(8, dtype=np.int16)})
    _, tensors = opened(path)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(FormatValueError, match="the file changed"):
        tensors["a"].read()


def test_a_file_replaced_after_the_first_read_still_gives_the_file_that_was_opened(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.safetensors", {"a": np.arange(8, dtype=np.int16)})
    reader, tensors = opened(path)
    assert tensors["a"].read()[1] == 1
    path.unlink()
    write_shard(path, {"a": np.full(8, 77, np.int16)})
    assert tensors["a"].read().tolist() == list(range(8))
    reader.close()
    with pytest.raises(FormatValueError, match="the file changed"):
        tensors["a"].read()


def test_a_file_truncated_while_it_is_read(tmp_path: Path) -> None:
    path = write_shard(
        tmp_path / "x.safetensors", {"a": np.arange(8, dtype=np.int16), "b": np.arange(4096, dtype=np.int16)}
    )
    reader, tensors = opened(path)
    assert tensors["a"].read()[3] == 3
    os.truncate(path, tensors["b"].entry.begin + 100)
    for attempt in (tensors["b"].read, lambda: tensors["b"].read_box((slice(10, 4000),), poisoned(2 * 3990))):
        with pytest.raises(FormatValueError, match=r"b: truncated: \d+ bytes wanted at byte \d+, \d+ read"):
            attempt()
    assert reader.bytes_read == 16, "a failed read counts nothing"


def test_a_vanished_file_is_a_format_error(tmp_path: Path) -> None:
    _, tensors = shard(tmp_path, a=np.zeros(4, np.int16))
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(FormatValueError, match=r"x\.safetensors: cannot be opened: No such file"):
        tensors["a"].read()


def test_reading_errors_are_format_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors = shard(tmp_path, a=np.zeros(4, np.int16))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FormatValueError, match=r"a: cannot be read at byte \d+: Input/output error"):
        tensors["a"].read()


def test_closing_frees_the_descriptor_and_reading_opens_again(tmp_path: Path) -> None:
    reader, tensors = shard(tmp_path, a=np.arange(4, dtype=np.int16))
    before = len(os.listdir("/proc/self/fd"))
    reader.close()
    for _ in range(2):
        assert tensors["a"].read().tolist() == [0, 1, 2, 3]
        assert len(os.listdir("/proc/self/fd")) == before + 1
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_forgotten_reader_closes_its_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader, tensors = shard(tmp_path, a=np.arange(4, dtype=np.int16))
    tensors["a"].read()
    del reader, tensors
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_a_reader(tmp_path: Path) -> None:
    array = np.arange(64 * 128, dtype=np.int16).reshape(64, 128)
    reader, tensors = shard(tmp_path, a=array)
    wrong: list[int] = []

    def work(start: int) -> None:
        for row in range(start, 64, 4):
            box = (slice(row, row + 1), slice(3, 99))
            wrong.extend([row] * (not np.array_equal(read_box(tensors["a"], box), array[box])))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert reader.bytes_read == 64 * 96 * 2


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_runs_of_a_box_are_where_its_bytes_lie(tmp_path: Path, data: st.DataObject) -> None:
    array = np.random.default_rng(5).integers(0, 2**16, (4, 5, 6), dtype=np.uint16)
    reader, tensors = shard(tmp_path, before=array, a=array)
    box = []
    for size in array.shape:
        start = data.draw(st.integers(0, size))
        box.append(slice(start, data.draw(st.integers(start, size))))
    runs, content = tensors["a"].runs(tuple(box)), reader.header.path.read_bytes()
    found = b"".join(content[place : place + runs.length] for place in (runs.begin + runs.places).tolist())
    assert found == array[tuple(box)].tobytes()
    assert runs.nbytes == len(found)
    assert runs.scatter is None
    assert MemoryArray(array).runs(tuple(box)) is None
    reader.close()


def test_runs_of_what_is_outside_are_refused(tmp_path: Path) -> None:
    _, tensors = shard(tmp_path, a=np.zeros((4, 5), dtype=np.int16))
    for view in (tensors["a"], MemoryArray(np.zeros((4, 5), dtype=np.int16))):
        with pytest.raises(FormatValueError, match="outside an axis of 5"):
            view.runs((slice(0, 4), slice(0, 6)))


def test_bytes_are_counted_unless_the_file_changed(tmp_path: Path) -> None:
    reader, _ = shard(tmp_path, a=np.zeros(4, dtype=np.int16))
    assert reader.count_if_unchanged(5)
    os.utime(reader.header.path, ns=(1, 1))
    assert not reader.count_if_unchanged(6)
    assert reader.bytes_read == 5
