"""Holds reads by threads of the kernel to the bytes of the files, to their ends, and to leaving no thread behind."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from exl3_files import write_shard
from trellis_format.files import pollers, reads
from trellis_format.files.arrays import FileArray, FileRuns, ShardReader
from trellis_format.files.header import read_header
from trellis_format.files.pollers import KernelReads, have_pollers, have_workers, open_pollers, open_workers
from trellis_format.files.reads import NUMBER_SHIFT, Reads, plan_reads
from trellis_format.files.uring import CQE, SQE

needs_pollers = pytest.mark.skipif(not have_pollers(), reason="this system has no io_uring that polls, or forbids it")


needs_workers = pytest.mark.skipif(not have_workers(), reason="this system has no io_uring, or forbids it")
WAYS = [
    pytest.param(0, marks=needs_workers, id="workers"),
    pytest.param(1, marks=needs_pollers, id="a poller"),
    pytest.param(3, marks=needs_pollers, id="pollers"),
]


def opened(count: int) -> KernelReads:
    """So many pollers; the kernel's workers for none."""
    return open_pollers(count) if count else open_workers()


def kernel_threads() -> list[str]:
    """Threads of the kernel that poll for this process; those that end have a moment for it."""
    found: list[str] = []
    for _ in range(200):
        found = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                found += [name] if (name := path.read_text().strip()).startswith("iou-sqp") else []
        if not found:
            break
        time.sleep(0.01)
    return found


@pytest.fixture
def views(tmp_path: Path) -> Iterator[list[FileArray]]:
    """Noise in two files."""
    made, rng = [], np.random.default_rng(7)
    for number in range(2):
        codes = rng.integers(-(2**15), 2**15, (90, 70, 16), dtype=np.int16)
        header = read_header(write_shard(tmp_path / f"{number}.safetensors", {"codes": codes}))
        made.append(FileArray(ShardReader(header), header.entries["codes"]))
    yield made
    assert kernel_threads() == []


def parts_of(views: list[FileArray]) -> tuple[list[FileRuns], bytes]:
    """Whole arrays, 90 runs and some short ones of each file, and their bytes."""
    words = slice(0, 16)
    parts, expected = [], b""
    for view in views:
        for rows, columns in ((slice(0, 90), slice(0, 70)), (slice(0, 90), slice(3, 60)), (slice(5, 8), slice(9, 10))):
            out = np.empty((rows.stop - rows.start) * (columns.stop - columns.start) * 32, dtype=np.uint8)
            view.read_box((rows, columns, words), out)
            parts.append(view.runs((rows, columns, words)))
            expected += out.tobytes()
    return parts, expected


@pytest.mark.parametrize("entries", [8, 1024])
@pytest.mark.parametrize("long", [1, 3000, 1 << 20])
@pytest.mark.parametrize("count", WAYS)
def test_reads_fill_their_buffers_in_any_number_at_a_time(
    views: list[FileArray], count: int, long: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pollers, "_ENTRIES", entries)
    monkeypatch.setattr(reads, "LONG_BYTES", long)
    monkeypatch.setattr(reads, "LONG_PIECE", 5000)
    monkeypatch.setattr(reads, "LARGE_PIECE", 5000)
    parts, expected = parts_of(views)
    outs = [np.full(len(expected), 0xA5, dtype=np.uint8) for _ in range(5)]
    with opened(count) as polled:
        for _ in range(2):
            for out in outs:
                out.fill(0xA5)
            tickets = [polled.start(plan_reads(parts, out.ctypes.data)) for out in outs]
            for ticket, out in reversed(list(zip(tickets, outs, strict=True))):
                polled.wait(ticket)
                assert ticket.done
                assert ticket.short_parts() == set()
                assert out.tobytes() == expected


@pytest.mark.parametrize("long", [3000, 1 << 20])
@pytest.mark.parametrize("count", WAYS)
def test_parts_that_are_short_are_named(
    views: list[FileArray], count: int, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LONG_BYTES", long)
    parts, expected = parts_of(views)
    out = np.full(len(expected), 0xA5, dtype=np.uint8)
    with opened(count) as polled:
        planned = plan_reads(parts, out.ctypes.data)
        os.truncate(views[1].file, os.path.getsize(views[1].file) - 1)
        ticket = polled.start(planned)
        polled.wait(ticket)
        assert ticket.short_parts() == {3}
    whole = parts[0].nbytes + parts[1].nbytes + parts[2].nbytes
    assert out[:whole].tobytes() == expected[:whole]


@pytest.mark.parametrize("count", WAYS)
def test_what_is_in_no_cache_is_read_too(views: list[FileArray], count: int) -> None:
    parts, expected = parts_of(views)
    for view in views:
        with open(view.file, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    out = np.full(len(expected), 0xA5, dtype=np.uint8)
    with opened(count) as polled:
        ticket = polled.start(plan_reads(parts, out.ctypes.data))
        polled.wait(ticket)
    assert ticket.short_parts() == set()
    assert out.tobytes() == expected


@pytest.mark.parametrize("count", WAYS)
def test_nothing_to_read_is_done_at_once(views: list[FileArray], count: int) -> None:
    with opened(count) as polled:
        for parts in ([], [views[0].runs((slice(4, 4), slice(0, 70), slice(0, 16)))]):
            ticket = polled.start(plan_reads(parts, 0))
            assert ticket.done
            polled.wait(ticket)


@pytest.mark.parametrize("count", WAYS)
def test_leaving_waits_for_what_was_started(views: list[FileArray], count: int) -> None:
    parts, expected = parts_of(views)
    out = np.full(len(expected), 0xA5, dtype=np.uint8)
    with opened(count) as polled:
        polled.start(plan_reads(parts, out.ctypes.data))
    assert out.tobytes() == expected


@pytest.mark.parametrize("count", WAYS)
def test_threads_that_slept_are_woken(views: list[FileArray], count: int) -> None:
    parts, expected = parts_of(views)
    with opened(count) as polled:
        for _ in range(3):
            out = np.full(len(expected), 0xA5, dtype=np.uint8)
            time.sleep(0.03)  # ten times as long as they look for work
            polled.wait(polled.start(plan_reads(parts, out.ctypes.data)))
            assert out.tobytes() == expected


def test_a_system_that_gives_no_more_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made, honest = [], pollers._Ring

    def second(*, polled: bool) -> object:
        if made:
            raise OSError(errno.ENOMEM, "no more")
        made.append(honest(polled=polled))
        return made[0]

    if have_pollers():
        with monkeypatch.context() as patch:
            patch.setattr(pollers, "_Ring", second)
            with pytest.raises(OSError, match="no more"):
                open_pollers(2)
        made.clear()
        assert kernel_threads() == []


def test_a_system_that_has_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, list[int]]:
        raise OSError(errno.EPERM, "no")

    changes = [
        (pollers.platform, "machine", lambda: "aarch64", True),  # stores may be seen in another order there
        (pollers, "_ANY_FILE", 0, True),  # the kernel would refuse each read
        (pollers, "set_up_ring", refuse, False),
    ]
    workers = have_workers()
    for owner, name, value, others in changes:
        for found in (have_pollers, have_workers):
            found.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not have_pollers()
            assert have_workers() == (others and workers)
    for found in (have_pollers, have_workers):
        found.cache_clear()


@pytest.mark.parametrize("first", [0, 50])
@pytest.mark.parametrize("order", ["as written down", "mixed"])
@pytest.mark.parametrize("few", [True, False])
def test_completions_are_noted_wherever_and_in_whatever_order_they_come(few: bool, order: str, first: int) -> None:
    rng = np.random.default_rng(5)
    made = [Reads(np.zeros(count, dtype=SQE), np.arange(1, count + 1), np.arange(count)) for count in (7, 40)]
    tickets = {reads.number: pollers.Ticket(reads) for reads in made}
    ended = np.zeros(45, dtype=CQE)  # all but the last two of the second
    ended["user_data"] = np.concatenate([reads.entries["user_data"] for reads in made])[:45]
    ended["result"] = np.concatenate([reads.sizes for reads in made])[:45]
    ended["result"][[3, 9, 44]] = 3, -errno.EIO, 0  # short, failed, at the end of its file
    ended["flags"] = 1  # which say nothing of a read
    if order == "mixed":
        rng.shuffle(ended)
    if few:
        ring, cqes = object.__new__(pollers._Ring), np.zeros(64, dtype=CQE)
        cqes[(first + np.arange(45)) % 64] = ended
        ring._dones, ring._cqe_words = 64, memoryview(cqes).cast("B").cast("Q")
        ring._note_few(first, 45, tickets)
    else:
        pollers._note_many(ended, tickets)
    short, long = (tickets[reads.number] for reads in made)
    assert (short.left, short.short, long.left, sorted(long.short)) == (0, [3], 2, [2, 37])
    assert int(made[0].entries["user_data"][6]) == (made[0].number << NUMBER_SHIFT) + 6
