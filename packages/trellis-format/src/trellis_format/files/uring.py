"""Owns reads of many pieces of a file at a time through Linux' io_uring, where the system lets a process use it.

It must not know what is read.  One thread submits the pieces of a buffer and the kernel's workers copy them in
parallel: Python threads that read wait for the interpreter's lock (from the page cache of an H200's host with 16 cores,
16 to 20 GB/s by four threads, 38 to 42 this way).  Nothing here may be left while the kernel still writes to the
caller's buffer, so it is for threads that no signal interrupts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LONG_BYTES", "PIECE_BYTES", "Ring", "have_ring", "thread_ring"]

PIECE_BYTES = 256 << 10
"""Bytes of a piece; smaller ones cost more to submit, larger ones keep fewer workers busy."""
LONG_BYTES = 64 << 10
"""Mean bytes of pieces from which on the kernel's workers copy them; shorter ones are copied by the thread that submits
them, outside the interpreter's lock, since waking a worker takes longer than that."""
_ENTRIES = 512
_SETUP, _ENTER = 425, 426  # the same on every architecture
_OFFSETSQES = 0x10000000
READ, READV, ASYNC = 22, 1, 1 << 4
_GETEVENTS, _SINGLE_MMAP = 1, 1
SQE = np.dtype(
    [
        ("opcode", "u1"), ("flags", "u1"), ("ioprio", "<u2"), ("fd", "<i4"), ("offset", "<u8"), ("address", "<u8"),
        ("length", "<u4"), ("rw_flags", "<u4"), ("user_data", "<u8"), ("rest", "<u8", (3,)),
    ]
)  # fmt: skip
CQE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
_libc = ctypes.CDLL(None, use_errno=True)
_local = threading.local()


class Ring:
    """A submission and a completion queue; for one thread.

    Raises:
        OSError: if the system has no io_uring or does not let this process use it.
    """

    def __init__(self) -> None:
        self._fd, params = set_up_ring(_ENTRIES)
        self._close = weakref.finalize(self, os.close, self._fd)
        sq, cq = params[10:20], params[20:30]  # byte offsets: head, tail, mask, entries, ...
        size = max(sq[6] + 4 * params[0], cq[5] + CQE.itemsize * params[1])
        self._rings = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
        entries = mmap.mmap(self._fd, SQE.itemsize * params[0], flags=mmap.MAP_SHARED, offset=_OFFSETSQES)
        self._tail, self._mask = self._word(sq[1]), int(self._word(sq[2])[0])
        np.frombuffer(self._rings, np.uint32, params[0], sq[6])[:] = np.arange(params[0])
        self._sqes = np.frombuffer(entries, SQE, params[0])
        self._done_head, self._done_tail = self._word(cq[0]), self._word(cq[1])
        self._done_mask = int(self._word(cq[2])[0])
        self._cqes = np.frombuffer(self._rings, CQE, params[1], cq[5])

    def read(self, descriptor: int, offsets: npt.NDArray[np.int64], length: int, out: npt.NDArray[np.uint8]) -> int:
        """Read runs of one length into a buffer, one after the other.

        Args:
            descriptor: of the file.
            offsets: `[runs] int64`, first byte of each run in the file.
            length: bytes of a run.
            out: `[runs * length] uint8`, contiguous.

        Returns:
            Bytes that are there from the buffer's start without a gap; fewer than all where the file ends or an I/O
            error came, which a read of the next byte will tell.
        """
        pieces = -(-length // PIECE_BYTES)
        starts = np.arange(pieces, dtype=np.int64) * PIECE_BYTES
        entries = np.zeros(len(offsets) * pieces, dtype=SQE)
        table = entries.reshape(len(offsets), pieces)
        table["opcode"], table["flags"], table["fd"] = READ, ASYNC if length >= LONG_BYTES else 0, descriptor
        table["offset"], table["length"] = offsets[:, None] + starts, np.minimum(length - starts, PIECE_BYTES)
        table["address"] = np.arange(len(offsets))[:, None] * length + starts + out.ctypes.data
        short = np.flatnonzero((results := self.run(entries)) != entries["length"])
        if not short.size:
            return out.size
        return int(entries["length"][: short[0]].sum()) + max(int(results[short[0]]), 0)

    def run(self, entries: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
        """Make reads and wait for all of them.

        Args:
            entries: `[reads] SQE`, whose memory the caller holds; `user_data` is written.

        Returns:
            `[reads] int32`: bytes that were read, or an errno below zero.
        """
        if len(entries) <= _ENTRIES:
            return self._round(entries)
        return np.concatenate(
            [self._round(entries[first : first + _ENTRIES]) for first in range(0, len(entries), _ENTRIES)]
        )

    def _round(self, entries: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
        """Submit at most a ring of reads and wait for all; their results in order."""
        count, tail = len(entries), int(self._tail[0])
        entries["user_data"] = np.arange(count)
        self._sqes[(tail + np.arange(count)) & self._mask] = entries
        self._tail[0] = (tail + count) & 0xFFFFFFFF
        left = count
        while left or self._completed() < count:
            left -= enter_ring(self._fd, left, count, _GETEVENTS)
        head = int(self._done_head[0])
        found = self._cqes[(head + np.arange(count)) & self._done_mask]
        results = np.empty(count, dtype=np.int32)
        results[found["user_data"].astype(np.int64)] = found["result"]
        self._done_head[0] = (head + count) & 0xFFFFFFFF
        return results

    def _completed(self) -> int:
        return (int(self._done_tail[0]) - int(self._done_head[0])) & 0xFFFFFFFF

    def _word(self, offset: int) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._rings, np.uint32, 1, offset)


def set_up_ring(entries: int, flags: int = 0, idle_ms: int = 0) -> tuple[int, list[int]]:
    """The descriptor of a ring, and its parameters as the kernel filled them in.

    Raises:
        OSError: if the system has no io_uring or does not let this process use it so.
    """
    params = (ctypes.c_uint32 * 30)()
    params[2], params[4] = flags, idle_ms
    descriptor = _checked(_libc.syscall(_SETUP, entries, params))
    if not params[5] & _SINGLE_MMAP:
        os.close(descriptor)
        raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.4")
    return descriptor, list(params)


def enter_ring(descriptor: int, submit: int, least: int, flags: int) -> int:
    """Submit reads and wait for some; how many were submitted, none where it was interrupted."""
    submitted = int(_libc.syscall(_ENTER, descriptor, submit, least, flags, None, 0))
    if submitted >= 0:
        return submitted
    if (code := ctypes.get_errno()) not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
        raise RuntimeError(f"io_uring_enter failed: {os.strerror(code)}")  # a ring in an unknown state
    return 0


def thread_ring() -> Ring | None:
    """The ring of the calling thread; None where there is none, and for the main thread, which signals interrupt."""
    if threading.current_thread() is threading.main_thread():
        return None
    ring: Ring | None = getattr(_local, "ring", None)
    if ring is None and not hasattr(_local, "ring"):
        try:
            ring = Ring() if sys.platform == "linux" else None
        except (OSError, ValueError):
            ring = None
        _local.ring = ring
    return ring


@cache
def have_ring() -> bool:
    """Whether threads of this process can have a ring, as it was when this was first asked."""
    try:
        return sys.platform == "linux" and Ring() is not None
    except (OSError, ValueError):
        return False


def _checked(result: Any) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
