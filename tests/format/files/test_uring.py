"""Holds reads through io_uring to the bytes of the file, to its end, and to doing without where there is none."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import write_shard
from trellis_format.errors import FormatValueError
from trellis_format.files import arrays, uring
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.files.uring import ASYNC, PIECE_BYTES, READ, SQE, Ring, have_ring, thread_ring

needs_ring = pytest.mark.skipif(not have_ring(), reason="this system has no io_uring, or forbids it")


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of work in a thread of its own, or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # raised again below
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    """Noise of some pieces and a bit."""
    return np.random.default_rng(0).integers(0, 256, 300 * PIECE_BYTES + 77, dtype=np.uint8)


@pytest.fixture
def descriptor(tmp_path: Path, content: np.ndarray) -> Iterator[int]:
    (tmp_path / "x").write_bytes(content.tobytes())
    opened = os.open(tmp_path / "x", os.O_RDONLY)
    yield opened
    os.close(opened)


@needs_ring
@pytest.mark.parametrize(
    ("runs", "length"),
    [(1, 1), (1, PIECE_BYTES), (1, 300 * PIECE_BYTES), (700, 1537), (3, 5 * PIECE_BYTES - 1), (0, 9)],
)
def test_runs_are_those_of_the_file(descriptor: int, content: np.ndarray, runs: int, length: int) -> None:
    rng = np.random.default_rng(runs)
    offsets = rng.integers(0, content.size - length + 1, runs)
    ring = Ring()
    for _ in range(3):  # the queues wrap around
        out = np.full(runs * length, 0xA5, dtype=np.uint8)
        assert ring.read(descriptor, offsets, length, out) == runs * length
        for run, offset in enumerate(offsets):
            assert np.array_equal(out[run * length : (run + 1) * length], content[offset : offset + length])


@needs_ring
def test_the_end_of_the_file_is_where_bytes_stop(descriptor: int, content: np.ndarray) -> None:
    out = np.full(4 * PIECE_BYTES, 0xA5, dtype=np.uint8)
    begin = content.size - 2 * PIECE_BYTES - 5
    assert Ring().read(descriptor, np.array([begin]), out.size, out) == 2 * PIECE_BYTES + 5
    assert np.array_equal(out[: 2 * PIECE_BYTES + 5], content[begin:])
    assert Ring().read(descriptor, np.array([0, content.size + 1, 0]), 100, out[:300]) == 100
    assert Ring().read(-1, np.array([0]), 100, out[:100]) == 0, "an error is no bytes"


@needs_ring
def test_a_thread_has_one_ring_and_the_main_thread_none() -> None:
    assert thread_ring() is None
    first, again = in_thread(lambda: (thread_ring(), thread_ring()))
    assert isinstance(first, Ring)
    assert first is again
    assert in_thread(thread_ring) is not first


@needs_ring
@pytest.mark.parametrize("flags", [0, ASYNC])
def test_reads_of_any_lengths_go_to_their_own_places(descriptor: int, content: np.ndarray, flags: int) -> None:
    rng, longest = np.random.default_rng(flags), 20_000
    lengths, offsets = rng.integers(1, longest, 900), rng.integers(0, content.size - longest, 900)
    out, places = np.full(900 * longest, 0xA5, dtype=np.uint8), np.arange(900) * longest
    entries = np.zeros(900, dtype=SQE)
    entries["opcode"], entries["flags"], entries["fd"], entries["offset"] = READ, flags, descriptor, offsets
    entries["address"], entries["length"] = places + out.ctypes.data, lengths
    entries["offset"][7] = content.size - 5
    entries["fd"][8] = -1
    found = Ring().run(entries)
    assert found[[7, 8]].tolist() == [min(5, lengths[7]), -errno.EBADF]
    lengths[[7, 8]], offsets[7] = (min(5, lengths[7]), 0), content.size - 5
    assert np.array_equal(np.maximum(found, 0), lengths)
    for place, offset, length in zip(places, offsets, lengths, strict=True):
        assert np.array_equal(out[place : place + length], content[offset : offset + length])
        assert (out[place + length : place + longest] == 0xA5).all()


def test_a_system_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "no")

    have_ring.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(uring, "Ring", refuse)
        assert not have_ring()
        assert not have_ring(), "it was asked once"
    have_ring.cache_clear()


def test_a_system_that_forbids_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*arguments: object) -> int:
        asked.append(arguments)
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(uring, "Ring", refuse)
    assert in_thread(lambda: [thread_ring(), thread_ring()]) == [None, None]
    assert len(asked) == 1


@needs_ring
@pytest.mark.parametrize("fault", [None, "short", "error"])
def test_a_large_tensor_is_the_same_whoever_reads_it(
    tmp_path: Path, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = np.random.default_rng(1).integers(-(2**15), 2**15, (64, 40, 64), dtype=np.int16)
    header = read_header(write_shard(tmp_path / "x.safetensors", {"codes": codes}))
    view = FileArray(ShardReader(header), header.entries["codes"])
    monkeypatch.setattr(arrays, "MANY_BYTES", 1000)
    honest, reads = Ring.read, []

    def counted(self: Ring, *arguments: Any) -> int:
        done = honest(self, *arguments)
        reads.append(done)
        return {None: done, "short": done // 2, "error": 0}[fault]

    monkeypatch.setattr(Ring, "read", counted)
    for box in ((slice(0, 64), slice(0, 40)), (slice(3, 60), slice(5, 39)), (slice(7, 8), slice(0, 1))):
        whole = (*box, slice(0, 64))
        out = np.full(codes[whole].nbytes, 0xA5, dtype=np.uint8)
        in_thread(lambda whole=whole, out=out: view.read_box(whole, out))
        assert out.tobytes() == codes[whole].tobytes()
    assert len(reads) == 2, "the last box is small"


@needs_ring
def test_a_file_that_was_cut_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.zeros(3 << 20, dtype=np.uint8)
    header = read_header(write_shard(tmp_path / "x.safetensors", {"codes": codes}))
    view = FileArray(ShardReader(header), header.entries["codes"])
    in_thread(view.read)
    os.truncate(header.path, 2 << 20)
    with pytest.raises(FormatValueError, match="truncated"):
        in_thread(view.read)
