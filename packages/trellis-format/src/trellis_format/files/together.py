"""Owns the read of runs of several tensors into one buffer at a time.  It must not know what they are read for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from trellis_format.files.arrays import FileRuns, ShardReader
from trellis_format.files.reads import plan_reads
from trellis_format.files.uring import thread_ring

__all__ = ["check_parts", "read_together"]


def read_together(parts: Sequence[FileRuns], out: npt.NDArray[np.uint8]) -> list[int]:
    """Fill a buffer with parts one after the other, all at a time where the system lets this thread.

    Args:
        parts: what is read.
        out: `[bytes of all parts] uint8`, contiguous.

    Returns:
        Indices of the parts that were not read: all of them without io_uring, and those whose file was short or
        changed.  Reading them one by one tells why, or does it.

    Raises:
        FormatValueError: if a file cannot be opened, or is not the one that its header came from.
    """
    ring = thread_ring()
    if ring is None or not parts:
        return list(range(len(parts)))
    reads = plan_reads(parts, out.ctypes.data)
    results, sizes = ring.run(reads.entries()), np.array([size for *_, size in reads.long], dtype=np.int64)
    short = np.flatnonzero(results != np.concatenate((sizes, reads.sizes)))
    owners = np.concatenate((np.array(reads.long_owners, dtype=np.int64), reads.owners))
    return check_parts(parts, set(owners[short].tolist()))


def check_parts(parts: Sequence[FileRuns], short: Collection[int]) -> list[int]:
    """Indices of the parts that are not as their files have them; the bytes of the others are counted.

    Args:
        parts: what was read.
        short: indices of those that were not read whole.
    """
    done: dict[ShardReader, int] = {}
    for index, part in enumerate(parts):
        done[part.reader] = done.get(part.reader, 0) + (0 if index in short else part.nbytes)
    changed = [reader for reader, nbytes in done.items() if not reader.count_if_unchanged(nbytes)]
    if not short and not changed:
        return []
    return [index for index, part in enumerate(parts) if index in short or part.reader in changed]
