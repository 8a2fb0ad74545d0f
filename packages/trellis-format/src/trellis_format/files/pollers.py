"""Owns reads that threads of the kernel make while this process writes down the next ones.

It must not know what is read.  Each ring has a thread of the kernel (io_uring's submission queue polling) that copies
out of the page cache as a thread of this process would, but without the interpreter's lock and without being woken for
each read: one Python thread keeps a dozen of them busy by writing to memory.  That needs a processor that keeps the
order of stores, so there are pollers on x86-64 alone.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import struct
import sys
import time
import weakref
from collections import deque
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trellis_format.files.reads import LongRead, Reads
from trellis_format.files.uring import CQE, READ, SQE, enter_ring, set_up_ring

__all__ = ["Pollers", "Ticket", "have_pollers"]

_ENTRIES = 1024
_POLLED, _CLAMP = 1 << 1, 1 << 4
_ANY_FILE = 1 << 7
_IDLE_MS = 2
_NEED_WAKEUP, _WAKEUP, _GETEVENTS = 1, 1 << 1, 1
_ENTRY = struct.Struct("<BBHiQQIIQ")
_DONE = struct.Struct("<Qi4x")
_FEW = 24
"""Completions up to which a loop over them is faster than arrays."""
_SPINS = 2000
"""Looks without news after which the thread sleeps between them: what is waited for then is no copy in memory."""
_NAP_SECONDS = 100e-6
_TICKET_BITS = 32


class Ticket:
    """Reads that were started.

    Attributes:
        reads: what they are.
        left: how many have not ended.
        short: indices of those that read less than their bytes; long ones count first.
    """

    def __init__(self, reads: Reads, number: int) -> None:
        self.reads, self.number = reads, number
        self.left = len(reads.long) + len(reads.short)
        self.short: list[int] = []

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return not self.left

    def short_parts(self) -> set[int]:
        """Parts of those that read less."""
        reads, first = self.reads, len(self.reads.long)
        return {reads.long_owners[index] if index < first else int(reads.owners[index - first]) for index in self.short}


class _Poller:
    """A ring and its thread of the kernel.

    Raises:
        OSError: if the system does not let this process have one.
    """

    def __init__(self) -> None:
        self.fd, params = set_up_ring(_ENTRIES, _POLLED | _CLAMP, _IDLE_MS)
        self._close = weakref.finalize(self, os.close, self.fd)
        if not params[5] & _ANY_FILE:
            self._close()
            raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.11 polls for registered files alone")
        sq, cq = params[10:20], params[20:30]
        self._rings = mmap.mmap(self.fd, max(sq[6] + 4 * params[0], cq[5] + CQE.itemsize * params[1]))
        self._memory = mmap.mmap(self.fd, SQE.itemsize * params[0], offset=0x10000000)
        self._words = memoryview(self._rings).cast("I")
        self._entries, self._dones = params[0], params[1]
        np.frombuffer(self._rings, np.uint32, params[0], sq[6])[:] = np.arange(params[0])
        self._sqes = np.frombuffer(self._memory, SQE, params[0])
        self._cqes = np.frombuffer(self._rings, CQE, params[1], cq[5])
        self._sq_tail, self._sq_flags, self._cq_head, self._cq_tail = sq[1] // 4, sq[4] // 4, cq[0] // 4, cq[1] // 4
        self._cqes_at = cq[5]
        self._tail, self._head = self._words[self._sq_tail], self._words[self._cq_head]
        self.flying = 0

    @property
    def room(self) -> int:
        """Reads that it can take now."""
        return self._entries - self.flying

    def push(self, read: LongRead, user: int) -> None:
        """Write one read down; `commit` starts it."""
        descriptor, offset, address, size = read
        at = (self._tail & (self._entries - 1)) * SQE.itemsize
        _ENTRY.pack_into(self._memory, at, READ, 0, 0, descriptor, offset, address, size, 0, user)
        self._tail = (self._tail + 1) & 0xFFFFFFFF
        self.flying += 1

    def push_many(self, entries: npt.NDArray[np.void]) -> None:
        """Write reads down, at most as many as there is room for."""
        count, first = len(entries), self._tail & (self._entries - 1)
        split = min(count, self._entries - first)
        self._sqes[first : first + split], self._sqes[: count - split] = entries[:split], entries[split:]
        self._tail = (self._tail + count) & 0xFFFFFFFF
        self.flying += count

    def commit(self) -> None:
        """Show the thread of the kernel what was written down."""
        self._words[self._sq_tail] = self._tail
        self.wake()

    def wake(self) -> None:
        """Wake the thread of the kernel where it sleeps; asked again while reads are waited for."""
        if self.flying and self._words[self._sq_flags] & _NEED_WAKEUP:
            enter_ring(self.fd, 0, 0, _WAKEUP)

    def ended(self, tickets: dict[int, Ticket]) -> bool:
        """Note what has ended; whether anything has."""
        count = (self._words[self._cq_tail] - self._head) & 0xFFFFFFFF
        if not count:
            return False
        if count <= _FEW:
            for index in range(self._head, self._head + count):
                user, result = _DONE.unpack_from(
                    self._rings, self._cqes_at + (index & (self._dones - 1)) * CQE.itemsize
                )
                _note(tickets[user >> _TICKET_BITS], user & 0xFFFFFFFF, result)
        else:
            self._note_many(count, tickets)
        self._head = (self._head + count) & 0xFFFFFFFF
        self._words[self._cq_head] = self._head
        self.flying -= count
        return True

    def _note_many(self, count: int, tickets: dict[int, Ticket]) -> None:
        """Note completions by stretches that ended in the order in which they were written down, as most do."""
        first = self._head & (self._dones - 1)
        split = min(count, self._dones - first)
        found = self._cqes[first : first + split]
        if split < count:
            found = np.concatenate((found, self._cqes[: count - split]))
        users = found["user_data"].astype(np.int64)
        starts = [0, *(np.flatnonzero(np.diff(users) != 1) + 1).tolist(), count]
        for start, end in pairwise(starts):
            user = int(users[start])
            ticket, index = tickets[user >> _TICKET_BITS], user & 0xFFFFFFFF
            while index < len(ticket.reads.long) and start < end:
                _note(ticket, index, int(found["result"][start]))
                index, start = index + 1, start + 1
            place = index - len(ticket.reads.long)
            bad = np.flatnonzero(found["result"][start:end] != ticket.reads.sizes[place : place + end - start])
            ticket.short += (bad + index).tolist()
            ticket.left -= end - start

    def close(self) -> None:
        """End the thread of the kernel, which lives as long as its memory is mapped."""
        self._words.release()
        for name in ("_sqes", "_cqes", "_rings", "_memory"):
            delattr(self, name)
        self._close()


def _note(ticket: Ticket, index: int, result: int) -> None:
    long = ticket.reads.long
    if result != (long[index][3] if index < len(long) else ticket.reads.sizes[index - len(long)]):
        ticket.short.append(index)
    ticket.left -= 1


class Pollers:
    """Rings with a thread of the kernel each; for one thread, which no signal may interrupt.  Use it as a context.

    Leaving waits for what was started, so that nothing writes to its memory any more.

    Args:
        count: how many.

    Raises:
        OSError: if the system does not let this process have them.
    """

    def __init__(self, count: int) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._waiting: deque[tuple[Ticket, int]] = deque()  # and the first read that is not written down
        self._numbers = self._next = self._looks = 0
        self._rings: list[_Poller] = []
        try:
            for _ in range(count):
                self._rings.append(_Poller())
        except OSError:
            self._close_rings()
            raise

    def __enter__(self) -> Pollers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, reads: Reads) -> Ticket:
        """Start reads.

        Args:
            reads: what to read; the caller holds the memory that they write to.
        """
        self._numbers += 1
        ticket = Ticket(reads, self._numbers)
        if ticket.left:
            self._tickets[ticket.number] = ticket
            reads.short["user_data"] = np.arange(len(reads.long), ticket.left) + (ticket.number << _TICKET_BITS)
            self._waiting.append((ticket, 0))
            self._feed()
        return ticket

    def look(self) -> bool:
        """See what has ended, and start what was waiting for room; whether anything had ended.

        Where nothing has for long, it sleeps.
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
        time.sleep(0 if self._looks < _SPINS else _NAP_SECONDS)  # others want the interpreter's lock and the core
        return False

    def wait(self, ticket: Ticket) -> None:
        """Wait until reads have ended."""
        while not ticket.done:
            self.look()
        self._tickets.pop(ticket.number, None)

    def close(self) -> None:
        """Wait for all reads, and end the threads of the kernel."""
        self._waiting.clear()  # not started, and nobody asks any more
        while any(ring.flying for ring in self._rings):
            self.look()
        self._close_rings()

    def _close_rings(self) -> None:
        for ring in self._rings:
            ring.close()
        self._rings = []

    def _feed(self) -> None:
        """Write down what waits, shared out over the rings in turn, as far as there is room."""
        touched: set[int] = set()
        while self._waiting:
            ticket, done = self._waiting[0]
            done = self._write_down(ticket, done, touched)
            if done < len(ticket.reads.long) + len(ticket.reads.short):
                self._waiting[0] = (ticket, done)
                break
            self._waiting.popleft()
        for index in touched:
            self._rings[index].commit()

    def _write_down(self, ticket: Ticket, done: int, touched: set[int]) -> int:
        reads, user = ticket.reads, ticket.number << _TICKET_BITS
        total, long, full = len(reads.long) + len(reads.short), len(reads.long), 0
        share = max(-(-len(reads.short) // len(self._rings)), 1)
        while done < total and full < len(self._rings):
            ring, index = self._rings[self._next], self._next
            self._next = (self._next + 1) % len(self._rings)
            if not (room := ring.room):
                full += 1
                continue
            full = 0
            touched.add(index)
            if done < long:
                ring.push(reads.long[done], user + done)
                done += 1
            else:
                count = min(share, room, total - done)
                ring.push_many(reads.short[done - long : done - long + count])
                done += count
        return done


@cache
def have_pollers() -> bool:
    """Whether this process can have pollers, as it was when this was first asked."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        _Poller().close()
    except (OSError, ValueError):
        return False
    return True
