"""Owns the pipeline: threads that fill slots and issue the copies out of them.  It must not know weights.

A thread takes a load and a slot, fills the slot, issues its copies and goes on to the next; nothing is handed from one
thread to another in between, since waking a thread takes longer than copying a slot.  Where threads of the kernel read
(pollers), one thread starts the reads of all slots and issues all copies: several threads that issue copies wait for
the interpreter's lock at each (on an H200's host with 16 cores, 16 threads moved 7 to 30 GB/s).

On any failure, in any thread, the others stop at their next step, and the caller sees the error after all have ended
and every copy has completed; an interrupt from the keyboard is a failure like others.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatError
from trellis_format.files.arrays import MANY_BYTES, FileRuns
from trellis_format.files.pollers import Pollers, Ticket, have_pollers
from trellis_format.files.reads import plan_reads
from trellis_format.files.together import check_parts, read_together
from trellis_prep.errors import PrepDeviceError
from trellis_prep.lanes import CopyLane, Move
from trellis_prep.slots import Slot, SlotRing

__all__ = ["Load", "Read", "transfer"]

_START_SECONDS = 1.0
"""How long a thread may take from its start to its first step; one that was interrupted before it began never does."""


@dataclass(frozen=True, eq=False)
class Read:
    """A part of a slot and what fills it.

    Attributes:
        first: byte of the slot to start at.
        nbytes: bytes of the part.
        fill: writes all of them into `[nbytes] uint8`.
        runs: where they lie in a file, so that the reads of a load can be one; None where only `fill` knows.
    """

    first: int
    nbytes: int
    fill: Callable[[npt.NDArray[np.uint8]], None]
    runs: FileRuns | None = None


@dataclass(frozen=True, eq=False)
class Load:
    """What passes through a slot in one turn.

    Attributes:
        name: for messages, such as "codes of experts 0..3".
        reads: what fills the slot, one after another.
        moves: where the bytes go.
    """

    name: str
    reads: tuple[Read, ...]
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read and moved."""
        return sum(read.nbytes for read in self.reads)


_Done = queue.SimpleQueue[int | BaseException | None]


def transfer(
    loads: Iterable[Load],
    ring: SlotRing,
    lane: CopyLane,
    moved: Callable[[int], None] | None,
    *,
    readers: int = 1,
    pollers: int = 0,
) -> None:
    """Move loads through a ring.

    When this returns or raises, every copy that was issued has completed and the readers have ended.

    Args:
        loads: taken one by one, in a reader's thread, never by two at a time.
        ring: slots at least as large as each load.
        lane: copies slots out.
        moved: called in this thread with the bytes of each load once its copies were issued; None lets this thread
            sleep meanwhile, since to wake it for each load holds up the readers.
        readers: threads that fill slots; with one, reads are done in the order of the loads.
        pollers: threads of the kernel that fill slots instead, from files, for one thread; without effect where the
            system does not give them.

    Raises:
        PrepDeviceError: if a copy fails; names the load.
        BaseException: what a read or `moved` raised.
    """
    feed, done = _Feed(loads), _Done()
    polled = pollers > 0 and have_pollers()
    readers = 1 if polled else readers
    with contextlib.ExitStack() as stack:  # each step is taken whatever happens to the one before
        stack.callback(_drain, lane)
        stack.callback(_discard, done)
        started: list[threading.Thread] = []
        stack.callback(_join, started)
        stack.callback(ring.cancel)
        for _ in range(readers):
            arguments = (feed, ring, lane, done, moved is not None, pollers if polled else 0)
            thread = threading.Thread(target=_work, args=arguments, name="trellis-prep-reader", daemon=True)
            started.append(thread)  # first: an interrupt may come while it starts
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                started.pop()
                raise
        running = readers
        while running:
            item = done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            elif moved is not None:
                moved(item)


class _Feed:
    """Hands loads out to threads, in order."""

    def __init__(self, loads: Iterable[Load]) -> None:
        self._loads: Iterator[Load] = iter(loads)
        self._lock = threading.Lock()

    def take(self) -> Load | None:
        """The next load; None when there is no more."""
        with self._lock:
            return next(self._loads, None)


def _work(feed: _Feed, ring: SlotRing, lane: CopyLane, done: _Done, tell: bool, pollers: int) -> None:
    def told(load: Load) -> None:
        if tell:
            done.put(load.nbytes)

    try:
        with lane.issuing():
            if (polled := _open_pollers(pollers)) is not None:
                with polled:
                    _poll(feed, ring, lane, polled, told)
            else:
                while (load := feed.take()) is not None and _move(load, ring, lane):
                    told(load)
    except BaseException as error:  # noqa: BLE001  # crosses to the thread that waits, which raises it
        done.put(error)
    finally:
        done.put(None)


def _move(load: Load, ring: SlotRing, lane: CopyLane) -> bool:
    """Fill a slot and issue its copies; whether the ring still lent one."""
    slot = ring.take()
    if slot is None or not _fill(_read_at_once(load, slot.array), slot, ring):
        return False
    _copy(load, slot, ring, lane)
    return True


def _open_pollers(count: int) -> Pollers | None:
    """Threads of the kernel that read; None where none are wanted or the system gives no more."""
    if not count:
        return None
    with contextlib.suppress(OSError):
        return Pollers(count)
    return None


def _poll(feed: _Feed, ring: SlotRing, lane: CopyLane, pollers: Pollers, told: Callable[[Load], None]) -> None:
    """Start reads into every slot that is free, and issue the copies out of those that are filled, in order."""
    flying: deque[tuple[Load, Slot, Ticket | None]] = deque()
    more = True
    while more or flying:
        if more and (ring.ready() or not flying):
            if (load := feed.take()) is None:
                more = False
            elif (slot := ring.take()) is None:
                return
            else:
                flying.append((load, slot, _start(load, slot, pollers)))
            continue
        if ring.cancelled:
            return
        load, slot, ticket = flying[0]
        if ticket is not None and not ticket.done:
            pollers.look()
            continue
        flying.popleft()
        if not _fill(load.reads if ticket is None else _missing(load, pollers, ticket), slot, ring):
            return
        _copy(load, slot, ring, lane)
        told(load)


def _start(load: Load, slot: Slot, pollers: Pollers) -> Ticket | None:
    """Start the reads of a load; None where they are to be made one after another."""
    if (parts := _parts(load)) is None:
        return None
    with contextlib.suppress(FormatError):  # to be found again by the read that names what it is of
        return pollers.start(plan_reads(parts, slot.array.ctypes.data))
    return None


def _missing(load: Load, pollers: Pollers, ticket: Ticket) -> list[Read]:
    pollers.wait(ticket)  # which forgets it
    parts = _parts(load)
    assert parts is not None  # as when it was started
    return [load.reads[index] for index in check_parts(parts, ticket.short_parts())]


def _read_at_once(load: Load, array: npt.NDArray[np.uint8]) -> Sequence[Read]:
    """Read what lies in files together; what is left to be filled one after another, and to say why where it cannot."""
    if (parts := _parts(load)) is not None:
        with contextlib.suppress(FormatError):  # as in `_start`
            return [load.reads[index] for index in read_together(parts, array[: load.nbytes])]
    return load.reads


def _parts(load: Load) -> list[FileRuns] | None:
    """Where a load lies in files; None where not all of it does, or it is small."""
    parts = [read.runs for read in load.reads if read.runs is not None]
    return parts if len(parts) == len(load.reads) and load.nbytes >= MANY_BYTES else None


def _fill(reads: Sequence[Read], slot: Slot, ring: SlotRing) -> bool:
    """Make reads one after another; whether the ring was not cancelled meanwhile."""
    array = slot.array
    for read in reads:
        if ring.cancelled:
            return False
        read.fill(array[read.first : read.first + read.nbytes])
    return True


def _copy(load: Load, slot: Slot, ring: SlotRing, lane: CopyLane) -> None:
    try:
        lane.copy(slot, load.moves)
        copied = lane.mark()
    except RuntimeError as error:
        raise PrepDeviceError(f"{load.name}: the copy of {load.nbytes} bytes failed: {error}") from error
    ring.release(slot, copied)


def _discard(done: _Done) -> None:
    """Let go of further errors: their frames hold tensors, and this queue."""
    with contextlib.suppress(queue.Empty):
        while True:
            done.get_nowait()


def _join(threads: list[threading.Thread]) -> None:
    with contextlib.ExitStack() as stack:  # an interrupted wait does not skip the others
        for thread in threads:
            stack.callback(_end, thread)


def _end(thread: threading.Thread) -> None:
    """Wait for a thread, also for one whose start was interrupted before it was known to run."""
    deadline = time.monotonic() + _START_SECONDS
    while thread.ident is None and time.monotonic() < deadline:
        time.sleep(0.001)
    while thread.ident is not None:
        with contextlib.suppress(RuntimeError):  # it runs and has not said so yet
            thread.join()
            return
        time.sleep(0.001)


def _drain(lane: CopyLane) -> None:
    try:
        lane.drain()
    except RuntimeError as error:
        raise PrepDeviceError(f"a copy failed: {error}") from error
