"""Holds reads of many parts at a time to reads one by one, and to telling which of them were not made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import write_shard
from format.files.test_uring import needs_ring
from trellis_format.files import reads
from trellis_format.files.arrays import FileArray, FileRuns, ShardReader
from trellis_format.files.header import read_header
from trellis_format.files.reads import check_parts, plan_reads
from trellis_format.files.uring import Ring


def opened(folder: Path, count: int = 3) -> list[FileArray]:
    """Noise in as many files."""
    rng, views = np.random.default_rng(count), []
    for number in range(count):
        codes = rng.integers(-(2**15), 2**15, (40, 30, 16), dtype=np.int16)
        header = read_header(write_shard(folder / f"{number}.safetensors", {"codes": codes}))
        views.append(FileArray(ShardReader(header), header.entries["codes"]))
    return views


def boxes() -> list[tuple[slice, ...]]:
    """One run, many of 96 bytes, none, and one short run."""
    whole, words = slice(0, 40), slice(0, 16)
    return [
        (whole, slice(0, 30), words),
        (slice(3, 39), slice(5, 8), words),
        (slice(4, 4), slice(0, 30), words),
        (slice(7, 8), slice(2, 3), words),
    ]


def parts_of(views: list[FileArray], *, scattered: bool) -> tuple[list[FileRuns], bytes]:
    """Every box of every file, every other one in segments of 16 bytes, the last one first, and what they make."""
    parts, expected = [], b""
    for number, (view, box) in enumerate((view, box) for view in views for box in boxes()):
        part, out = view.runs(box), np.empty(int(np.prod(view.box_shape(box))) * 2, dtype=np.uint8)
        view.read_box(box, out)
        if scattered and number % 2 and part.nbytes:
            places = np.arange(out.size - 16, -1, -16).reshape(len(part.places), -1)
            part, out = part._replace(scatter=places), out.reshape(-1, 16)[::-1]
        parts.append(part)
        expected += out.tobytes()
    return parts, expected


def read(parts: list[FileRuns]) -> tuple[list[int], np.ndarray]:
    """What a ring missed, and the buffer that it filled, poisoned before."""
    out = np.full(sum(part.nbytes for part in parts), 0xA5, dtype=np.uint8)
    planned = plan_reads(parts, out.ctypes.data)
    short = planned.owners[Ring().run(planned.entries) != planned.sizes]
    return check_parts(parts, set(short.tolist())), out


@needs_ring
@pytest.mark.parametrize("long", [1, 100, 1 << 20])
@pytest.mark.parametrize("scattered", [False, True])
def test_all_parts_are_those_read_one_by_one(
    tmp_path: Path, scattered: bool, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LONG_BYTES", long)
    monkeypatch.setattr(reads, "LONG_PIECE", 70)
    monkeypatch.setattr(reads, "LARGE_PIECE", 70)
    views = opened(tmp_path)
    parts, expected = parts_of(views, scattered=scattered)
    before = sum(part.reader.bytes_read for part in parts[::4])
    missing, out = read(parts)
    assert missing == []
    assert out.tobytes() == expected
    assert sum(part.reader.bytes_read for part in parts[::4]) - before == len(expected)


@needs_ring
@pytest.mark.parametrize("long", [1, 1 << 20])
def test_short_parts_are_named_and_the_others_read(tmp_path: Path, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "LONG_BYTES", long)
    parts, expected = parts_of(opened(tmp_path, 1), scattered=False)
    honest, size = Ring.run, parts[0].nbytes

    def cut(self: Ring, *arguments: Any) -> np.ndarray:
        found = honest(self, *arguments).copy()
        found[5] -= 1  # a run of the second part
        return found

    monkeypatch.setattr(Ring, "run", cut)
    missing, out = read(parts)
    assert missing == [1]
    assert out[:size].tobytes() == expected[:size]
    assert out[size + parts[1].nbytes :].tobytes() == expected[size + parts[1].nbytes :]


@needs_ring
def test_parts_of_a_file_that_changed_are_named(tmp_path: Path) -> None:
    views = opened(tmp_path, 2)
    parts, _ = parts_of(views, scattered=False)
    os.utime(views[1].file, ns=(1, 1))
    before = parts[4].reader.bytes_read
    assert read(parts)[0] == [4, 5, 6, 7]
    assert parts[4].reader.bytes_read == before
