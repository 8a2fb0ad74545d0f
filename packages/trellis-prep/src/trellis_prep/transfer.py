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
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatError
from trellis_format.files.arrays import MANY_BYTES, FileRuns
from trellis_format.files.pollers import KernelReads, Ticket, open_pollers, open_workers
from trellis_format.files.reads import Reads, check_parts, plan_reads
from trellis_format.files.uring import thread_ring
from trellis_prep.errors import PrepDeviceError
from trellis_prep.lanes import CopyLane, Move
from trellis_prep.slots import Slot, SlotRing

__all__ = ["AnyLoad", "Load", "Read", "transfer"]

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


class AnyLoad(Protocol):
    """What passes through a slot in one turn, such as a `Load`."""

    @property
    def name(self) -> str:
        """For messages, such as "codes of experts 0..3"."""

    @property
    def nbytes(self) -> int:
        """Bytes read and moved."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """What fills the slot, one after another."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """Where the bytes go."""

    def planned(self, address: int) -> Reads | None:
        """All reads into memory at an address, to be made at a time; None where only `reads` knows."""

    def unread(self, short: set[int]) -> list[Read]:
        """What is to be read again, which does it or tells why it cannot be.

        Args:
            short: parts, counted as `reads`, that were not read whole; those whose file changed come in addition.
        """


@dataclass(frozen=True, eq=False)
class Load:
    """What passes through a slot in one turn; its attributes and methods are those of `AnyLoad`."""

    name: str
    reads: tuple[Read, ...]
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read and moved."""
        return sum(read.nbytes for read in self.reads)

    def planned(self, address: int) -> Reads | None:
        """See `AnyLoad`; None where a part lies in memory, or a file cannot be opened."""
        if len(parts := self._parts()) < len(self.reads):
            return None
        with contextlib.suppress(FormatError):  # to be found again by the read that names what it is of
            return plan_reads(parts, address)
        return None

    def unread(self, short: set[int]) -> list[Read]:
        """See `AnyLoad`."""
        return [self.reads[index] for index in check_parts(self._parts(), short)]

    def _parts(self) -> list[FileRuns]:
        return [read.runs for read in self.reads if read.runs is not None]


_Done = queue.SimpleQueue[int | BaseException | None]


def transfer(
    loads: Iterable[AnyLoad],
    ring: SlotRing,
    lane: CopyLane,
    moved: Callable[[int], None] | None,
    *,
    readers: int = 1,
    pollers: int = 0,
    workers: bool = False,
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
        workers: whether the kernel's own pool does.

    Raises:
        PrepDeviceError: if a copy fails; names the load.
        BaseException: what a read or `moved` raised.
    """
    feed, done = _Feed(loads), _Done()
    readers = 1 if (kernel := _open(pollers, workers)) is not None else readers
    with contextlib.ExitStack() as stack:  # each step is taken whatever happens to the one before
        stack.callback(_drain, lane)
        stack.callback(_discard, done)
        started: list[threading.Thread] = []
        stack.callback(_join, started)
        stack.callback(ring.cancel)
        for _ in range(readers):
            arguments = (feed, ring, lane, done, moved is not None, kernel)
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

    def __init__(self, loads: Iterable[AnyLoad]) -> None:
        self._loads: Iterator[AnyLoad] = iter(loads)
        self._lock = threading.Lock()

    def take(self) -> AnyLoad | None:
        """The next load; None when there is no more."""
        with self._lock:
            return next(self._loads, None)


def _work(feed: _Feed, ring: SlotRing, lane: CopyLane, done: _Done, tell: bool, kernel: KernelReads | None) -> None:
    def told(load: AnyLoad) -> None:
        if tell:
            done.put(load.nbytes)

    try:
        with lane.issuing():
            if kernel is not None:
                with kernel:
                    _poll(feed, ring, lane, kernel, told)
            else:
                while (load := feed.take()) is not None and _move(load, ring, lane):
                    told(load)
    except BaseException as error:  # noqa: BLE001  # crosses to the thread that waits, which raises it
        done.put(error)
    finally:
        done.put(None)


def _move(load: AnyLoad, ring: SlotRing, lane: CopyLane) -> bool:
    """Fill a slot and issue its copies; whether the ring still lent one."""
    slot = ring.take()
    if slot is None or not _fill(_read_at_once(load, slot), slot, ring):
        return False
    _copy(load, slot, ring, lane)
    return True


def _open(pollers: int, workers: bool) -> KernelReads | None:
    """What reads in the kernel; None where nothing is wanted or the system gives no more."""
    with contextlib.suppress(OSError):
        return open_workers() if workers else open_pollers(pollers) if pollers else None
    return None


def _poll(feed: _Feed, ring: SlotRing, lane: CopyLane, kernel: KernelReads, told: Callable[[AnyLoad], None]) -> None:
    """Start reads into every slot that is free, and issue the copies out of those that are filled, in order."""
    flying: deque[tuple[AnyLoad, Slot, Ticket | None]] = deque()
    more = True
    while more or flying:
        if more and (ring.ready() or not flying):
            if (load := feed.take()) is None:
                more = False
            elif (slot := ring.take()) is None:
                return
            else:
                reads = _planned(load, slot)
                flying.append((load, slot, None if reads is None else kernel.start(reads)))
            continue
        if ring.cancelled:
            return
        load, slot, ticket = flying[0]
        if ticket is not None and not ticket.done:
            kernel.look()
            continue
        flying.popleft()
        if ticket is not None:
            kernel.wait(ticket)  # which forgets it
        left = load.reads if ticket is None else load.unread(ticket.short_parts())
        if left and not _fill(left, slot, ring):
            return
        _copy(load, slot, ring, lane)
        told(load)


def _planned(load: AnyLoad, slot: Slot) -> Reads | None:
    """The reads of a load that are worth to be made at a time."""
    return load.planned(slot.address) if load.nbytes >= MANY_BYTES else None


def _read_at_once(load: AnyLoad, slot: Slot) -> Sequence[Read]:
    """Read what lies in files at a time; what is left to be filled one after another."""
    if (ring := thread_ring()) is None or (reads := _planned(load, slot)) is None:
        return load.reads
    short = np.flatnonzero(ring.run(reads.entries) != reads.sizes)
    return load.unread(set(reads.owners[short].tolist()))


def _fill(reads: Sequence[Read], slot: Slot, ring: SlotRing) -> bool:
    """Make reads one after another; whether the ring was not cancelled meanwhile."""
    array = slot.array
    for read in reads:
        if ring.cancelled:
            return False
        read.fill(array[read.first : read.first + read.nbytes])
    return True


def _copy(load: AnyLoad, slot: Slot, ring: SlotRing, lane: CopyLane) -> None:
    try:
        lane.copy(slot, load.moves)
        copied = lane.mark(slot)
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
