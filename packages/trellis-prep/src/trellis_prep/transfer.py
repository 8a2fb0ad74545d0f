"""Owns the pipeline: threads that fill slots and issue the copies out of them.  It must not know weights.

A thread takes a load and a slot, fills the slot, issues its copies and goes on to the next; nothing is handed from one
thread to another in between, since waking a thread takes longer than copying a slot.  On any failure, in any thread,
the others stop at their next step, and the caller sees the error after all have ended and every copy has completed; an
interrupt from the keyboard is a failure like others.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_prep.errors import PrepDeviceError
from trellis_prep.lanes import CopyLane, Move
from trellis_prep.slots import SlotRing

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
    """

    first: int
    nbytes: int
    fill: Callable[[npt.NDArray[np.uint8]], None]


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
    loads: Iterable[Load], ring: SlotRing, lane: CopyLane, moved: Callable[[int], None], *, readers: int = 1
) -> None:
    """Move loads through a ring.

    When this returns or raises, every copy that was issued has completed and the readers have ended.

    Args:
        loads: taken one by one, in a reader's thread, never by two at a time.
        ring: slots at least as large as each load.
        lane: copies slots out.
        moved: called in this thread with the bytes of each load once its copies were issued.
        readers: threads that fill slots; with one, reads are done in the order of the loads.

    Raises:
        PrepDeviceError: if a copy fails; names the load.
        BaseException: what a read or `moved` raised.
    """
    feed, done = _Feed(loads), _Done()
    with contextlib.ExitStack() as stack:  # each step is taken whatever happens to the one before
        stack.callback(_drain, lane)
        stack.callback(_discard, done)
        started: list[threading.Thread] = []
        stack.callback(_join, started)
        stack.callback(ring.cancel)
        for _ in range(readers):
            arguments = (feed, ring, lane, done)
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
            else:
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


def _work(feed: _Feed, ring: SlotRing, lane: CopyLane, done: _Done) -> None:
    try:
        with lane.issuing():
            while (load := feed.take()) is not None and _move(load, ring, lane):
                done.put(load.nbytes)
    except BaseException as error:  # noqa: BLE001  # crosses to the thread that waits, which raises it
        done.put(error)
    finally:
        done.put(None)


def _move(load: Load, ring: SlotRing, lane: CopyLane) -> bool:
    """Fill a slot and issue its copies; whether the ring still lent one."""
    slot = ring.take()
    if slot is None:
        return False
    array = slot.array
    for read in load.reads:
        if ring.cancelled:
            return False
        read.fill(array[read.first : read.first + read.nbytes])
    try:
        lane.copy(slot, load.moves)
        copied = lane.mark()
    except RuntimeError as error:
        raise PrepDeviceError(f"{load.name}: the copy of {load.nbytes} bytes failed: {error}") from error
    ring.release(slot, copied)
    return True


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
