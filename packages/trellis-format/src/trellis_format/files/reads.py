"""Owns the reads that runs of files take, as io_uring wants them.  It must not make them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trellis_format.files.arrays import FileRuns, ShardReader
from trellis_format.files.uring import ASYNC, LONG_BYTES, READ, READV, SQE

__all__ = ["LONG_PIECE", "NUMBER_SHIFT", "Reads", "check_parts", "plan_reads"]

LONG_PIECE = 512 << 10
"""Most bytes of the even pieces into which long runs are cut, so that several copy one."""
LARGE_PIECE = 2 << 20
"""The same where all parts have `MANY_PIECES` of the others, since each takes a moment to start: from the page cache of
an H200's host to its GPU, 37 to 41 GB/s instead of 27."""
MANY_PIECES = 12
_LINE = 64  # bytes of a cache line, which pieces end at where they are larger than many
_FEW = 256  # reads up to which a list, which is fast to look up, is not large beside them
NUMBER_SHIFT = 32
"""Bits of `user_data` below the number of reads, which count them."""
_numbers = itertools.count(1)
_SEGMENT = np.dtype([("address", "<u8"), ("length", "<u8")])


@dataclass(frozen=True, eq=False)
class Reads:
    """Reads that together fill parts of a buffer.

    Attributes:
        entries: `[reads] SQE`; those of long runs are for the kernel's workers.
        sizes: `[reads] int64`, bytes of each.
        owners: `[reads] int64`, the part of each.
        vectors: places of those that scatter, which entries point to.
    """

    entries: npt.NDArray[np.void]
    sizes: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    vectors: tuple[npt.NDArray[np.void], ...] = ()

    @cached_property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """`[reads] uint64`, the bytes of files to begin at, where entries have them: to write here moves the reads."""
        return self.entries["offset"]

    @cached_property
    def raw(self) -> memoryview:
        """The bytes of the entries, which a memoryview copies in a tenth of the time of records."""
        return self.entries.data.cast("B")

    @cached_property
    def counts(self) -> list[int] | npt.NDArray[np.int64]:
        """`sizes`, as a list where they are few."""
        if len(self.sizes) > _FEW:
            return self.sizes
        counts: list[int] = self.sizes.tolist()
        return counts

    @cached_property
    def number(self) -> int:
        """Tells them from all others of the process; the upper half of `user_data`, which asking writes."""
        number = next(_numbers)
        self.entries["user_data"] = np.arange(len(self.entries), dtype=np.uint64) + np.uint64(number << NUMBER_SHIFT)
        return number

    def at(self, address: int) -> Reads:
        """The same reads into memory that begins so many bytes later."""
        entries = self.entries.copy()
        plain = entries["opcode"] == READ
        entries["address"][plain] += address
        vectors = []
        for old in self.vectors:
            new = old.copy()
            new["address"] += address
            own = (entries["address"] >= old.ctypes.data) & (entries["address"] < old.ctypes.data + old.nbytes) & ~plain
            entries["address"][own] += np.uint64((new.ctypes.data - old.ctypes.data) % 2**64)
            vectors.append(new)
        return Reads(entries, self.sizes, self.owners, tuple(vectors))


def plan_reads(parts: Sequence[FileRuns], address: int) -> Reads:
    """The reads of parts that lie one after the other in memory.

    Args:
        parts: what is read.
        address: of the first byte of the first one.

    Raises:
        FormatValueError: if a file cannot be opened, or is not the one that its header came from.
    """
    groups: list[_Group] = []
    piece = LARGE_PIECE if sum(part.nbytes for part in parts) >= MANY_PIECES * LONG_PIECE else LONG_PIECE
    for index, part in enumerate(parts):
        if groups and groups[-1].takes(part):
            groups[-1].add(index, part, address)
        else:
            groups.append(_Group(index, part, address, piece))
        address += part.nbytes
    entries = np.zeros(sum(group.count for group in groups), dtype=SQE)
    sizes = np.empty(len(entries), dtype=np.int64)
    owners = np.empty(len(entries), dtype=np.int64)
    vectors: list[npt.NDArray[np.void]] = []
    first = 0
    for group in groups:
        own = slice(first, first + group.count)
        group.write(entries[own], sizes[own], owners[own], vectors)
        first = own.stop
    return Reads(entries, sizes, owners, tuple(vectors))


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


class _Group:
    """Parts whose runs lie alike, as those of one projection of several experts do: their reads are made at a time."""

    def __init__(self, index: int, part: FileRuns, address: int, piece: int) -> None:
        self.part = part
        self.indices, self.addresses = [index], [address]
        self.begins, self.descriptors = [part.begin], [part.reader.descriptor()]
        whole = part.scatter is not None or part.length < LONG_BYTES
        even = max(part.length, 1) if whole else -(-part.length // -(-part.length // piece))
        self._piece = even if whole else min(-(-even // _LINE) * _LINE, piece)
        self._starts = np.arange(0, max(part.length, 1), self._piece, dtype=np.int64)

    @property
    def count(self) -> int:
        """Reads of all parts."""
        return len(self.indices) * len(self.part.places) * len(self._starts)

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

    def write(
        self,
        entries: npt.NDArray[np.void],
        sizes: npt.NDArray[np.int64],
        owners: npt.NDArray[np.int64],
        vectors: list[npt.NDArray[np.void]],
    ) -> None:
        """Write down the reads, `[parts, runs, pieces]`, and keep what they point to."""
        part, pieces = self.part, self._starts
        shape = len(self.indices), len(part.places), len(pieces)
        lengths = np.minimum(part.length - pieces, self._piece) if len(pieces) > 1 else np.full(1, part.length)
        sizes.reshape(shape)[...] = lengths
        owners.reshape(shape)[...] = np.array(self.indices)[:, None, None]
        table, addresses = entries.reshape(shape), np.array(self.addresses, dtype=np.int64)[:, None, None]
        table["fd"] = np.array(self.descriptors)[:, None, None]
        table["offset"] = np.array(self.begins, dtype=np.int64)[:, None, None] + part.places[:, None] + pieces
        if part.scatter is None:
            table["opcode"], table["length"] = READ, lengths
            table["flags"] = ASYNC if part.length >= LONG_BYTES else 0
            table["address"] = addresses + np.arange(shape[1])[:, None] * part.length + pieces
            return
        segments = part.scatter.shape[1]
        places = np.empty((shape[0], *part.scatter.shape), dtype=_SEGMENT)
        places["address"], places["length"] = addresses + part.scatter, part.length // segments
        table["opcode"], table["length"] = READV, segments
        entries["address"] = places.ctypes.data + np.arange(len(entries)) * (segments * _SEGMENT.itemsize)
        vectors.append(places)
