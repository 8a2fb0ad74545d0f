"""Holds the reads that parts take to writing each byte of them once, from its place to its place."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from exl3_files import write_shard
from trellis_format.files import reads
from trellis_format.files.arrays import FileArray, FileRuns, ShardReader
from trellis_format.files.header import read_header
from trellis_format.files.reads import NUMBER_SHIFT, Reads, plan_reads
from trellis_format.files.uring import ASYNC, READ, READV


@pytest.fixture
def view(tmp_path: Path) -> FileArray:
    codes = np.random.default_rng(2).integers(-(2**15), 2**15, (12, 30, 16), dtype=np.int16)
    header = read_header(write_shard(tmp_path / "x.safetensors", {"codes": codes}))
    return FileArray(ShardReader(header), header.entries["codes"])


def make(planned: Reads, content: bytes, nbytes: int) -> tuple[bytes, list[int]]:
    """Do what reads say with loops, in a buffer at address 0, and count the writes of each byte."""
    out, hits = bytearray(nbytes), [0] * nbytes

    def write(place: int, offset: int, size: int) -> None:
        out[place : place + size] = content[offset : offset + size]
        for index in range(place, place + size):
            hits[index] += 1

    for entry, size in zip(planned.entries, planned.sizes.tolist(), strict=True):
        offset, address, length = (int(entry[name]) for name in ("offset", "address", "length"))
        if entry["opcode"] == READ:
            assert length == size
            write(address, offset, length)
            continue
        assert entry["opcode"] == READV
        words = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (length, 2))
        assert int(words[:, 1].sum()) == size
        for place, count in words.tolist():
            write(place, offset, count)
            offset += count
    return bytes(out), hits


@pytest.mark.parametrize("piece", [33, 1 << 20])
@pytest.mark.parametrize("long", [1, 100, 1 << 20])
@pytest.mark.parametrize("scattered", [False, True])
def test_each_byte_is_written_once(
    view: FileArray, scattered: bool, long: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LONG_BYTES", long)
    monkeypatch.setattr(reads, "LONG_PIECE", piece)
    monkeypatch.setattr(reads, "LARGE_PIECE", 3 * piece)
    words, parts, expected = slice(0, 16), [], b""
    for rows, columns in ((slice(0, 12), slice(0, 30)), (slice(1, 12), slice(3, 7)), (slice(3, 3), slice(0, 30))):
        out = np.empty((rows.stop - rows.start) * (columns.stop - columns.start) * 32, dtype=np.uint8)
        view.read_box((rows, columns, words), out)
        part: FileRuns = view.runs((rows, columns, words))
        if scattered and part.nbytes:
            part = part._replace(scatter=np.arange(out.size - 32, -1, -32).reshape(len(part.places), -1))
            out = out.reshape(-1, 32)[::-1]
        parts += [part, part]
        expected += out.tobytes() * 2
    planned, moved = plan_reads(parts, 0), plan_reads(parts, 0).at(1000).at(96)
    content = Path(view.file).read_bytes()
    for made, begin in ((planned, 0), (moved, 1096)):
        found, hits = make(made, content, begin + len(expected))
        assert found[begin:] == expected
        assert set(hits[:begin]) <= {0}
        assert set(hits[begin:]) == {1}
    late = planned.entries["flags"] == ASYNC
    assert max(planned.sizes[late], default=0) <= (3 * piece if len(expected) >= 12 * piece else piece)
    assert not late[planned.entries["opcode"] == READV].any()
    owned = np.zeros(6, dtype=np.int64)
    np.add.at(owned, planned.owners, planned.sizes)
    assert owned.tolist() == [part.nbytes for part in parts]
    assert set(planned.entries["fd"].tolist()) == {parts[0].reader.descriptor()}


def test_long_runs_are_for_workers_and_neighbours_are_planned_at_a_time(
    view: FileArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LONG_BYTES", 300)
    narrow = view.runs((slice(0, 12), slice(2, 9), slice(0, 16)))
    wide = view.runs((slice(0, 12), slice(0, 30), slice(0, 16)))
    entries = plan_reads([narrow, narrow._replace(begin=narrow.begin + 64), wide], 4096).entries
    assert entries["flags"].tolist() == [0] * 24 + [ASYNC]
    assert entries["length"].tolist() == [7 * 32] * 24 + [12 * 30 * 32]
    assert entries["address"].tolist() == list(range(4096, 4096 + 25 * 7 * 32, 7 * 32))
    shift = (entries["offset"][12:24].astype(np.int64) - entries["offset"][:12].astype(np.int64)).tolist()
    assert shift == [64] * 12
    assert plan_reads([], 0).entries.size == 0


def test_pieces_of_a_long_run_are_even_and_end_at_lines(view: FileArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "LONG_BYTES", 1)
    whole = view.runs((slice(0, 12), slice(0, 30), slice(0, 16)))
    for piece, sizes in ((11519, [5760] * 2), (11520, [11520]), (4000, [3840] * 3), (3900, [3840] * 3)):
        monkeypatch.setattr(reads, "LONG_PIECE", piece)
        assert plan_reads([whole], 0).sizes.tolist() == sizes
    monkeypatch.setattr(reads, "LONG_PIECE", 2400)
    assert plan_reads([whole], 64).sizes.tolist() == [2304] * 5
    assert plan_reads([whole], 64).entries["address"].tolist() == [64 + 2304 * piece for piece in range(5)]


@pytest.mark.parametrize("few", [1, 256])
def test_entries_are_told_by_numbers_and_can_be_moved(
    view: FileArray, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_FEW", few)
    planned = plan_reads([view.runs((slice(1, 12), slice(3, 7), slice(0, 16)))], 0)
    moved = planned.at(64)
    assert planned.number != moved.number
    for made in (planned, moved):
        assert made.entries["user_data"].tolist() == [(made.number << NUMBER_SHIFT) + index for index in range(11)]
        assert list(made.counts) == made.sizes.tolist()
        made.offsets[...] = np.arange(11)
        assert bytes(made.raw) == made.entries.tobytes()
        assert made.entries["offset"].tolist() == list(range(11))
