"""Owns what passes through the slots for the codes of a share: a load for each batch, and its reads.

It must not know threads or devices.  A layer has thousands of reads and its copy takes milliseconds, so that reads are
planned once for each kind of batch; a further batch of the kind differs in files and bytes of its linears alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, repeat

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.errors import FormatError
from trellis_format.files.arrays import FileRuns, ShardReader
from trellis_format.files.reads import Reads, check_parts, plan_reads
from trellis_format.source import TrellisWeights
from trellis_prep.lanes import Move
from trellis_prep.layout import WORD_BYTES
from trellis_prep.plan import PreparationPlan
from trellis_prep.reader import ShareReader
from trellis_prep.staging import Batch
from trellis_prep.transfer import Read

__all__ = ["CodeLoad", "CodeLoads"]

_AHEAD = 512
"""Reads whose places are worked out at a time: arrays of a few cost more to make than to fill in."""
_Parts = list[tuple[int, tuple[int, int]]]  # a projection, and rows [first, end) of its tiles


@dataclass(eq=False)
class _Kind:
    """The reads of batches that lie alike, from the begins of their linears, into memory at 0 or at a slot.

    Attributes:
        reads: into memory at 0, of the first such batch.
        linears: `[reads] int64`, the linear of each, counted from the batch's first.
        places: `[reads] int64`, its byte counted from the begin of its linear.
        at: `reads` into memory at an address; a slot is used by one load at a time, so each has its own to write to.
    """

    reads: Reads
    linears: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    at: dict[int, Reads] = field(default_factory=dict)


class CodeLoads:
    """The loads of a share's codes.

    Args:
        plan: the share and its batches.
        weights: the layer's arrays.
        codes: `[bytes] uint8`, where they go.
    """

    def __init__(self, plan: PreparationPlan, weights: TrellisWeights, codes: torch.Tensor) -> None:
        layout = plan.layout
        self._batches, self._codes, self._half_bits = plan.batches, codes, layout.half_bits
        self._reader = ShareReader(layout.source, weights, layout.extent)
        self._projections = layout.offsets.shape[1]
        self._rows = [layout.rows(projection) for projection in range(self._projections)]
        self._row_bytes, self._places = layout.row_bytes.tolist(), layout.offsets.tolist()
        self._kinds: dict[object, _Kind | None] = {}
        self._files, self._begins, self._descriptors = self._starts()
        self._one_file = len(set(map(id, self._files))) == 1
        self._one_rate = bool((self._half_bits == self._half_bits[:1]).all())

    def __iter__(self) -> Iterator[CodeLoad]:
        for key, alike in groupby(self._batches, self._key):
            batches = list(alike)
            if key not in self._kinds:
                self._kinds[key] = self._kind(batches[0]) if self._files else None
            yield from self._loads(self._kinds[key], self._parts(batches[0]), batches)

    @property
    def in_files(self) -> bool:
        """Whether all codes lie in files."""
        return bool(self._files)

    def reads(self, batch: Batch) -> Iterator[Read]:
        """What fills a slot with a batch, projection by projection, and in each expert by expert."""
        filled = 0
        for projection, (first, end) in self._parts(batch):
            for expert in range(batch.first, batch.end):
                nbytes = (end - first) * self._row_bytes[expert][projection]
                fill = partial(self._reader.read, expert, projection, first=first, end=end)
                yield Read(filled, nbytes, fill, self._reader.runs(expert, projection, first, end))
                filled += nbytes

    def moves(self, batch: Batch, parts: _Parts) -> tuple[Move, ...]:
        """Where a batch goes: its experts are neighbours in the layout too, so one copy for each projection."""
        filled = 0
        moves: list[Move] = []
        for projection, (first, end) in parts:
            sizes = self._row_bytes[batch.first : batch.end]
            nbytes = batch.nbytes if len(parts) == 1 else (end - first) * sum(size[projection] for size in sizes)
            place = self._places[batch.first][projection] * WORD_BYTES + first * sizes[0][projection]
            moves.append(Move(filled, self._codes, place, nbytes))
            filled += nbytes
        return tuple(moves)

    def unchanged(self, batch: Batch, parts: _Parts) -> bool:
        """Whether the files of a batch are as they were when they were opened; its bytes are counted if so."""
        if self._one_file:
            return self._files[0].count_if_unchanged(batch.nbytes)
        first, done = batch.first * self._projections, dict[ShardReader, int]()
        for projection, (start, end) in parts:
            for expert in range(batch.end - batch.first):
                file = self._files[first + expert * self._projections + projection]
                nbytes = (end - start) * self._row_bytes[batch.first + expert][projection]
                done[file] = done.get(file, 0) + nbytes
        return all(file.count_if_unchanged(nbytes) for file, nbytes in done.items())

    def _key(self, batch: Batch) -> object:
        """What batches whose reads lie alike have in common."""
        rates = None if self._one_rate else self._half_bits[batch.first : batch.end].tobytes()
        return batch.end - batch.first, batch.parts, rates

    def _loads(self, kind: _Kind | None, parts: _Parts, batches: Sequence[Batch]) -> Iterator[CodeLoad]:
        """Loads of batches of a kind, with the bytes and files that their reads begin at."""
        if kind is None:
            yield from (CodeLoad(self, parts, batch) for batch in batches)
            return
        step = max(_AHEAD // max(len(kind.linears), 1), 1)
        for first in range(0, len(batches), step):
            some = batches[first : first + step]
            linears = kind.linears + np.array([[batch.first * self._projections] for batch in some])
            offsets = self._begins[linears] + kind.places
            files = [None] * len(some) if self._one_file else self._descriptors[linears]
            yield from map(CodeLoad, repeat(self), repeat(parts), some, repeat(kind), offsets, files)

    def _parts(self, batch: Batch) -> _Parts:
        parts = [(0, count) for count in self._rows] if batch.parts is None else batch.parts
        return [(projection, part) for projection, part in enumerate(parts) if part[0] < part[1]]

    def _starts(self) -> tuple[list[ShardReader], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """File, first byte and descriptor of each linear; none where they are not all in files that can be opened."""
        nothing = np.empty(0, dtype=np.int64)
        if not self._batches or (starts := self._reader.starts()) is None:
            return [], nothing, nothing
        files, begins = starts
        try:
            known = {file: file.descriptor() for file in dict.fromkeys(files)}
        except FormatError:  # to be found again by the read that names what it is of
            return [], nothing, nothing
        return files, begins, np.array([known[file] for file in files], dtype=np.int64)

    def _kind(self, batch: Batch) -> _Kind | None:
        parts: list[FileRuns] = []
        for read in self.reads(batch):
            if read.runs is None:
                return None
            parts.append(read.runs)
        try:
            reads = plan_reads(parts, 0)
        except FormatError:
            return None
        experts = np.arange(batch.end - batch.first, dtype=np.int64) * self._projections
        owners = np.concatenate([experts + projection for projection, _ in self._parts(batch)])[reads.owners]
        begins = self._begins[owners + batch.first * self._projections]
        return _Kind(reads, owners, reads.entries["offset"].astype(np.int64) - begins)


class CodeLoad:
    """A batch of codes; see `transfer.Load`.

    Attributes:
        nbytes: bytes read and moved.

    Args:
        loads: of the share.
        parts: the rows of tiles of each projection that it has some of.
        batch: which.
        kind: of its reads; None where they are to be made one after another.
        offsets: `[reads] int64`, the bytes of files that they begin at.
        files: `[reads] int64`, the descriptors; None where there is one file.
    """

    __slots__ = ("_batch", "_files", "_kind", "_loads", "_offsets", "_parts", "nbytes")

    def __init__(
        self,
        loads: CodeLoads,
        parts: _Parts,
        batch: Batch,
        kind: _Kind | None = None,
        offsets: npt.NDArray[np.int64] | None = None,
        files: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._loads, self._parts, self._batch, self.nbytes = loads, parts, batch, batch.nbytes
        self._kind, self._offsets, self._files = kind, offsets, files

    @property
    def name(self) -> str:
        """For messages."""
        return f"codes of experts {self._batch.first}..{self._batch.end}"

    @property
    def reads(self) -> tuple[Read, ...]:
        """What fills the slot, one after another."""
        return tuple(self._loads.reads(self._batch))

    @property
    def moves(self) -> tuple[Move, ...]:
        """Where the bytes go."""
        return self._loads.moves(self._batch, self._parts)

    def planned(self, address: int) -> Reads | None:
        """All reads into memory; None where they are to be made one after another."""
        if (kind := self._kind) is None or self._offsets is None:
            return None
        if (found := kind.at.get(address)) is None:
            found = kind.at[address] = kind.reads.at(address)
        found.offsets[...] = self._offsets
        if self._files is not None:
            found.entries["fd"] = self._files
        return found

    def unread(self, short: set[int]) -> list[Read]:
        """What is to be read again; see `transfer.Load.unread`."""
        if not short and self._loads.unchanged(self._batch, self._parts):
            return []
        reads = self.reads
        return [reads[index] for index in check_parts([read.runs for read in reads if read.runs is not None], short)]
