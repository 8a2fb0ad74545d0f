"""Owns the reads that runs of files take, as io_uring wants them.  It must not make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trellis_format.files.arrays import FileRuns
from trellis_format.files.uring import ASYNC, LONG_BYTES, READ, READV, SQE

__all__ = ["LONG_PIECE", "LongRead", "Reads", "plan_reads"]

LONG_PIECE = 512 << 10
"""Bytes into which long runs are cut, so that several copy one."""
_FEW_RUNS = 4
"""Runs up to which a loop over them is faster than arrays."""
_SEGMENT = np.dtype([("address", "<u8"), ("length", "<u8")])

LongRead = tuple[int, int, int, int]
"""(descriptor, offset, address, bytes)."""


@dataclass(eq=False)
class Reads:
    """Reads that together fill parts of a buffer.

    Attributes:
        long: those of long runs, few enough for a loop.
        long_owners: the part of each.
        short: `[reads] SQE`, of short runs.
        sizes: `[reads] int64`, bytes of each short one.
        owners: `[reads] int64`, the part of each short one.
        held: memory that short reads point to.
    """

    long: list[LongRead] = field(default_factory=list)
    long_owners: list[int] = field(default_factory=list)
    short: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, dtype=SQE))
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    owners: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    held: list[npt.NDArray[np.void]] = field(default_factory=list)

    def entries(self) -> npt.NDArray[np.void]:
        """All of them, the long ones first, to be copied by the kernel's workers: `[reads] SQE`."""
        found = np.zeros(len(self.long), dtype=SQE)
        found["opcode"], found["flags"] = READ, ASYNC
        if self.long:
            table = np.array(self.long, dtype=np.int64).T
            found["fd"], found["offset"], found["address"], found["length"] = table
        return np.concatenate((found, self.short))


def plan_reads(parts: Sequence[FileRuns], address: int) -> Reads:
    """The reads of parts that lie one after the other in memory.

    Args:
        parts: what is read.
        address: of the first byte of the first one.

    Raises:
        FormatValueError: if a file cannot be opened, or is not the one that its header came from.
    """
    reads, short = Reads(), []
    for index, part in enumerate(parts):
        if part.scatter is None and (part.length >= LONG_BYTES or len(part.places) <= _FEW_RUNS):
            _cut(reads, index, part, address)
        else:
            short.append((index, part, address))
        address += part.nbytes
    if not short:
        return reads
    counts = [len(part.places) for _, part, _ in short]
    reads.short, reads.sizes = np.zeros(sum(counts), dtype=SQE), np.empty(sum(counts), dtype=np.int64)
    reads.owners = np.repeat([index for index, _, _ in short], counts)
    first = 0
    for (_, part, at), count in zip(short, counts, strict=True):
        entries = reads.short[first : first + count]
        entries["fd"], entries["offset"] = part.reader.descriptor(), part.places + part.begin
        reads.sizes[first : first + count] = part.length
        if part.scatter is None:
            entries["opcode"], entries["length"] = READ, part.length
            entries["address"] = np.arange(at, at + count * part.length, part.length) if part.length else at
        else:
            segments = part.scatter.shape[1]
            vectors = np.empty(part.scatter.shape, dtype=_SEGMENT)
            vectors["address"], vectors["length"] = part.scatter + at, part.length // segments
            entries["opcode"], entries["length"] = READV, segments
            entries["address"] = vectors.ctypes.data + np.arange(count) * (segments * _SEGMENT.itemsize)
            reads.held.append(vectors)
        first += count
    return reads


def _cut(reads: Reads, index: int, part: FileRuns, address: int) -> None:
    descriptor, length = part.reader.descriptor(), part.length
    for place in part.places.tolist():
        offset = part.begin + place
        for first in range(0, length, LONG_PIECE):
            size = min(LONG_PIECE, length - first)
            reads.long.append((descriptor, offset + first, address + first, size))
            reads.long_owners.append(index)
        address += length
