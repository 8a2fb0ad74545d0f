"""Owns reads that the kernel makes while one thread of this process goes on writing down the next ones.

It must not know what is read.  Threads of the interpreter that read wait for its lock after each read; here one thread
keeps many copies out of the page cache going.  *Workers* are the kernel's own pool behind a ring: they are woken for
each read, which long ones are worth.  *Pollers* are rings with a thread of the kernel each, which looks for reads in
memory and copies any number of short ones without being woken; that needs a processor that keeps the order of stores,
so there are pollers on x86-64 alone.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trellis_format.files.reads import NUMBER_SHIFT, Reads
from trellis_format.files.uring import CQE, SQE, enter_ring, set_up_ring

__all__ = ["KernelReads", "Ticket", "have_pollers", "have_workers", "open_pollers", "open_workers"]

_ENTRIES = 1024
_POLLED, _CLAMP = 1 << 1, 1 << 4
_ANY_FILE = 1 << 7
_IDLE_MS = 2
_NEED_WAKEUP, _WAKEUP, _GETEVENTS = 1, 1 << 1, 1
_FEW = 24
"""Completions up to which a loop over them is faster than arrays."""
_SPINS = 4
"""Looks without news from workers after which the thread sleeps until there are some: to look on takes from those who
copy."""
_POLLER_SPINS = 40
"""The same of pollers, whose news wake nobody, so that the thread sleeps for a moment."""
_LEAST_NEWS = 4
_NAP_SECONDS = 100e-6
_COUNTS = (1 << NUMBER_SHIFT) - 1
_WORD = 0xFFFFFFFF


class Ticket:
    """Reads that were started.

    Attributes:
        reads: what they are.
        left: how many have not ended.
        counts: bytes of each.
        short: indices of those that read less than their bytes.
    """

    __slots__ = ("counts", "left", "reads", "short")

    def __init__(self, reads: Reads) -> None:
        self.reads, self.counts = reads, reads.counts
        self.left = len(self.counts)
        self.short: list[int] = []

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return not self.left

    def short_parts(self) -> set[int]:
        """Parts of those that read less."""
        return set(self.reads.owners[self.short].tolist()) if self.short else set()


class _Ring:
    """A ring whose reads end while others are written down.

    Raises:
        OSError: if the system does not let this process have one.
    """

    def __init__(self, *, polled: bool) -> None:
        self.polled = polled
        self.fd, params = set_up_ring(_ENTRIES, _CLAMP | (_POLLED if polled else 0), _IDLE_MS if polled else 0)
        self._close = weakref.finalize(self, os.close, self.fd)
        if polled and not params[5] & _ANY_FILE:
            self._close()
            raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.11 polls for registered files alone")
        sq, cq = params[10:20], params[20:30]
        self._rings = mmap.mmap(self.fd, max(sq[6] + 4 * params[0], cq[5] + CQE.itemsize * params[1]))
        self._memory = mmap.mmap(self.fd, SQE.itemsize * params[0], offset=0x10000000)
        self._words = memoryview(self._rings).cast("I")
        self._entries, self._dones = params[0], params[1]
        np.frombuffer(self._rings, np.uint32, params[0], sq[6])[:] = np.arange(params[0])
        self._cqes = np.frombuffer(self._rings, CQE, params[1], cq[5])
        self._sqe_bytes = memoryview(self._memory)
        self._cqe_words = self._cqes.data.cast("B").cast("Q")  # two each: user_data; result and flags
        self._sq_tail, self._sq_flags, self._cq_head, self._cq_tail = sq[1] // 4, sq[4] // 4, cq[0] // 4, cq[1] // 4
        self._tail, self._head = self._words[self._sq_tail], self._words[self._cq_head]
        self._unseen = self.flying = 0

    @property
    def room(self) -> int:
        """Reads that it can take now."""
        return self._entries - self.flying

    def push(self, reads: Reads, begin: int, count: int) -> None:
        """Write reads down, at most as many as there is room for; `commit` starts them."""
        first, bytes_of, size = self._tail & (self._entries - 1), reads.raw, SQE.itemsize
        fit = min(count, self._entries - first)
        self._sqe_bytes[first * size : (first + fit) * size] = bytes_of[begin * size : (begin + fit) * size]
        if fit < count:
            self._sqe_bytes[: (count - fit) * size] = bytes_of[(begin + fit) * size : (begin + count) * size]
        self._tail = (self._tail + count) & _WORD
        self._unseen += count
        self.flying += count

    def commit(self) -> None:
        """Show the kernel what was written down."""
        self._words[self._sq_tail] = self._tail
        if self.polled:
            self._unseen = 0
            self.wake()
        while self._unseen:
            self._unseen -= enter_ring(self.fd, self._unseen, 0, 0)

    def wake(self) -> None:
        """Wake the thread of the kernel where it sleeps; asked again while reads are waited for."""
        if self.polled and self.flying and self._words[self._sq_flags] & _NEED_WAKEUP:
            enter_ring(self.fd, 0, 0, _WAKEUP)

    def rest(self, least: int) -> None:
        """Sleep until some reads have ended."""
        if self.polled:
            time.sleep(_NAP_SECONDS)
        else:
            enter_ring(self.fd, 0, min(least, self.flying), _GETEVENTS)

    def ended(self, tickets: dict[int, Ticket]) -> bool:
        """Note what has ended; whether anything has."""
        count = (self._words[self._cq_tail] - self._head) & _WORD
        if not count:
            return False
        first = self._head & (self._dones - 1)
        if count <= _FEW:
            self._note_few(first, count, tickets)
        else:
            found = self._cqes[first : first + count]
            if len(found) < count:
                found = np.concatenate((found, self._cqes[: count - len(found)]))
            _note_many(found, tickets)
        self._head = (self._head + count) & _WORD
        self._words[self._cq_head] = self._head
        self.flying -= count
        return True

    def _note_few(self, first: int, count: int, tickets: dict[int, Ticket]) -> None:
        words, mask = self._cqe_words, self._dones - 1
        for place in range(first, first + count):
            at = 2 * (place & mask)
            user = words[at]
            ticket, index = tickets[user >> NUMBER_SHIFT], user & _COUNTS
            if words[at + 1] & _WORD != ticket.counts[index]:  # an errno is below zero, so above any size here
                ticket.short.append(index)
            ticket.left -= 1

    def close(self) -> None:
        """Free it; a thread of the kernel lives as long as its memory is mapped."""
        for view in (self._words, self._sqe_bytes, self._cqe_words):
            view.release()
        for name in ("_cqes", "_rings", "_memory"):
            delattr(self, name)
        self._close()


def _note_many(found: npt.NDArray[np.void], tickets: dict[int, Ticket]) -> None:
    """Note completions by stretches that ended in the order in which they were written down, as those of pollers do."""
    users, results = found["user_data"].astype(np.int64), found["result"]
    breaks = (np.flatnonzero(np.diff(users) != 1) + 1).tolist()
    if len(breaks) * _FEW > len(users):  # out of order, as workers are
        for user, result in zip(users.tolist(), results.tolist(), strict=True):
            ticket, index = tickets[user >> NUMBER_SHIFT], user & _COUNTS
            if result != ticket.counts[index]:
                ticket.short.append(index)
            ticket.left -= 1
        return
    for start, end in pairwise([0, *breaks, len(users)]):
        user = int(users[start])
        ticket, index = tickets[user >> NUMBER_SHIFT], user & _COUNTS
        bad = np.flatnonzero(results[start:end] != ticket.reads.sizes[index : index + end - start])
        ticket.short += (bad + index).tolist()
        ticket.left -= end - start


class KernelReads:
    """Rings that read; for one thread, which no signal may interrupt.  Use it as a context.

    Leaving waits for what was started, so that nothing writes to its memory any more.

    Args:
        rings: what reads are shared out over.
    """

    def __init__(self, rings: Sequence[_Ring]) -> None:
        self._rings = list(rings)
        self._only = rings[0] if len(rings) == 1 else None
        self._tickets: dict[int, Ticket] = {}
        self._waiting: deque[tuple[Ticket, int]] = deque()  # and the first read that is not written down
        self._next = self._looks = 0

    def __enter__(self) -> KernelReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, reads: Reads) -> Ticket:
        """Start reads.

        Args:
            reads: what to read, whose `user_data` is written, and which are not started again before they have ended;
                the caller holds the memory that they write to.
        """
        ticket = Ticket(reads)
        if count := ticket.left:
            self._tickets[reads.number] = ticket
            only = self._only
            if only is not None and not self._waiting and only.room >= count:
                only.push(reads, 0, count)
                only.commit()
            else:
                self._waiting.append((ticket, 0))
                self._feed()
        return ticket

    def look(self) -> bool:
        """See what has ended, and start what was waiting for room; whether anything had ended.

        Where nothing has for some looks, it sleeps.
        """
        news = False
        for ring in self._rings:
            if ring.flying and ring.ended(self._tickets):
                news = True
        if self._waiting:
            self._feed()
        if news:
            self._looks = 0
            return True
        for ring in self._rings:
            ring.wake()
        self._looks += 1
        if self._looks < (_POLLER_SPINS if self._rings[0].polled else _SPINS):
            os.sched_yield()  # others want the interpreter's lock and the core
        else:
            next((ring for ring in self._rings if ring.flying), self._rings[0]).rest(_LEAST_NEWS)
        return False

    def wait(self, ticket: Ticket) -> None:
        """Wait until reads have ended."""
        while not ticket.done:
            self.look()
        self._tickets.pop(ticket.reads.number, None)

    def close(self) -> None:
        """Wait for all reads, and free the rings."""
        self._waiting.clear()  # not started, and nobody asks any more
        while any(ring.flying for ring in self._rings):
            self.look()
        for ring in self._rings:
            ring.close()
        self._rings, self._only = [], None

    def _feed(self) -> None:
        """Write down what waits, shared out over the rings in turn, as far as there is room."""
        touched: set[int] = set()
        while self._waiting:
            ticket, done = self._waiting[0]
            done = self._write_down(ticket, done, touched)
            if done < len(ticket.counts):
                self._waiting[0] = (ticket, done)
                break
            self._waiting.popleft()
        for index in touched:
            self._rings[index].commit()

    def _write_down(self, ticket: Ticket, done: int, touched: set[int]) -> int:
        reads, total, full = ticket.reads, len(ticket.counts), 0
        share = -(-total // len(self._rings))
        while done < total and full < len(self._rings):
            ring, index = self._rings[self._next], self._next
            self._next = (self._next + 1) % len(self._rings)
            if count := min(share, ring.room, total - done):
                ring.push(reads, done, count)
                done, full = done + count, 0
                touched.add(index)
            else:
                full += 1
        return done


def open_pollers(count: int) -> KernelReads:
    """Rings with a thread of the kernel each.

    Args:
        count: how many.

    Raises:
        OSError: if the system does not let this process have them.
    """
    rings: list[_Ring] = []
    try:
        rings.extend(_Ring(polled=True) for _ in range(count))  # an error leaves those before it
    except OSError:
        KernelReads(rings).close()
        raise
    return KernelReads(rings)


def open_workers() -> KernelReads:
    """A ring with the kernel's own pool behind it.

    Raises:
        OSError: if the system does not let this process have it.
    """
    return KernelReads([_Ring(polled=False)])


@cache
def have_pollers() -> bool:
    """Whether this process can have pollers, as it was when this was first asked."""
    return platform.machine().lower() in ("x86_64", "amd64") and _have(polled=True)


@cache
def have_workers() -> bool:
    """Whether this process can have workers, as it was when this was first asked."""
    return _have(polled=False)


def _have(*, polled: bool) -> bool:
    try:
        if sys.platform == "linux":
            _Ring(polled=polled).close()
            return True
    except (OSError, ValueError):
        pass
    return False
