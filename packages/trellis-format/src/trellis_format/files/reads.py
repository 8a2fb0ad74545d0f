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
    reads, groups = Reads(), list[_Group]()
    for index, part in enumerate(parts):
        if part.scatter is None and (part.length >= LONG_BYTES or len(part.places) <= _FEW_RUNS):
            _cut(reads, index, part, address)
        elif groups and groups[-1].takes(part):
            groups[-1].add(index, part, address)
        else:
            groups.append(_Group(index, part, address))
        address += part.nbytes
    if not groups:
        return reads
    reads.short = np.zeros(sum(group.count for group in groups), dtype=SQE)
    first = 0
    for group in groups:
        group.write(reads.short[first : first + group.count], reads.held)
        first += group.count
    reads.sizes = np.repeat([group.part.length for group in groups], [group.count for group in groups])
    reads.owners = np.concatenate([np.repeat(group.indices, len(group.part.places)) for group in groups])
    return reads


class _Group:
    """Parts whose runs lie alike, as those of one projection of several experts do: their reads are made at a time."""

    def __init__(self, index: int, part: FileRuns, address: int) -> None:
        self.part = part
        self.indices, self.addresses = [index], [address]
        self.begins, self.descriptors = [part.begin], [part.reader.descriptor()]

    @property
    def count(self) -> int:
        """Reads of all parts."""
        return len(self.indices) * len(self.part.places)

    def takes(self, part: FileRuns) -> bool:
        """Whether a part is like those that it has."""
        own = self.part
        return part.places is own.places and part.scatter is own.scatter and part.length == own.length

    def add(self, index: int, part: FileRuns, address: int) -> None:
        """Take one more."""
        self.indices.append(index)
        self.addresses.append(address)
        self.begins.append(part.begin)
        self.descriptors.append(part.reader.descriptor())

    def write(self, entries: npt.NDArray[np.void], held: list[npt.NDArray[np.void]]) -> None:
        """Write down the reads, and keep what they point to."""
        part, addresses = self.part, np.array(self.addresses, dtype=np.int64)
        table = entries.reshape(len(self.indices), -1)
        table["fd"] = np.array(self.descriptors)[:, None]
        table["offset"] = np.array(self.begins, dtype=np.int64)[:, None] + part.places
        if part.scatter is None:
            table["opcode"], table["length"] = READ, part.length
            table["address"] = addresses[:, None] + np.arange(len(part.places)) * part.length
            return
        segments = part.scatter.shape[1]
        vectors = np.empty((len(addresses), *part.scatter.shape), dtype=_SEGMENT)
        vectors["address"], vectors["length"] = addresses[:, None, None] + part.scatter, part.length // segments
        table["opcode"], table["length"] = READV, segments
        entries["address"] = vectors.ctypes.data + np.arange(len(entries)) * (segments * _SEGMENT.itemsize)
        held.append(vectors)


def _cut(reads: Reads, index: int, part: FileRuns, address: int) -> None:
    descriptor, length = part.reader.descriptor(), part.length
    for place in part.places.tolist():
        offset = part.begin + place
        for first in range(0, length, LONG_PIECE):
            size = min(LONG_PIECE, length - first)
            reads.long.append((descriptor, offset + first, address + first, size))
            reads.long_owners.append(index)
        address += length
