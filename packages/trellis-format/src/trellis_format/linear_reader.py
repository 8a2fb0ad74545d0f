"""Owns the read of any rows of tiles of a linear's share into a buffer, whatever the layout of the codes.

It must not know devices or threads; a reader may be used by several threads at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import ArrayView, FileArray, FileRuns, ShardReader
from trellis_format.rates import TILE, Rate
from trellis_format.slots import PLANES, section_offsets
from trellis_format.source import Projection, TrellisSource, TrellisWeights

__all__ = ["SCRATCH_BYTES", "LinearReader", "SlotLinear", "linear_view"]

MOST_SEGMENTS = 1024
"""Places that one system call can scatter a run to, on Linux."""
SCRATCH_BYTES = 256 << 10
"""Bytes of sections that a read of slot-major codes holds before their tiles are put in order, or one if longer."""


class SlotLinear(ArrayView):
    """One linear of slot-major codes as an array of tiles, `[k_tiles, n_tiles, 16*K] int16`; codes stay where they are.

    Args:
        rows: `[slots, row_bytes] uint8`.
        first: first byte of the linear's sections in a row.
        hidden_tiles: tiles of the hidden axis.
        rate: K.
        down: whether the intermediate axis is k (down) or n (gate, up).
    """

    def __init__(self, rows: ArrayView, first: int, hidden_tiles: int, rate: Rate, *, down: bool) -> None:
        planes = rows.shape[0] * PLANES
        self.shape = (*((planes, hidden_tiles) if down else (hidden_tiles, planes)), rate.tile_words16)
        self.dtype = np.dtype(np.int16)
        self._rows, self._first, self._tile, self._down = rows, first, rate.tile_bytes, down
        self._plane = hidden_tiles * rate.tile_bytes

    def read(self) -> npt.NDArray[Any]:
        """The whole linear, freshly read."""
        flat = np.empty(self.nbytes, dtype=np.uint8)
        self.read_box(tuple(slice(0, size) for size in self.shape), flat)
        return flat.view(self.dtype).reshape(self.shape)

    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        """Read whole tiles into a buffer; see `ArrayView.read_box`.

        Raises:
            FormatValueError: if the box cuts tiles.
        """
        lengths = self._check_out(box, out)
        if not out.size:
            return
        if lengths[2] != self.shape[2]:
            raise FormatValueError(f"box cuts tiles: {lengths[2]} of {self.shape[2]} words")
        planes, hidden = (box[0], box[1]) if self._down else (box[1], box[0])
        whole = planes.start % PLANES == planes.stop % PLANES == 0 and (hidden.stop - hidden.start) * self._tile == (
            self._plane
        )
        if whole and self._down:  # a section is the tiles of two rows of tiles, in order
            self._rows.read_box(self._sections(planes), out)
            return
        tiles = out.view(f"V{self._tile}").reshape(lengths[:2])  # a tile is moved as one element
        by_channel = tiles if self._down else tiles.swapaxes(0, 1)
        if whole:
            self._read_sections(planes, by_channel)
        else:
            self._read_planes(planes, hidden, by_channel)

    def runs(self, box: tuple[slice, ...]) -> FileRuns | None:
        """Where the bytes of whole tiles lie; see `ArrayView.runs`."""
        lengths = self.box_shape(box)
        (planes, hidden), tiles = (box[:2], lengths[1]) if self._down else (box[1::-1], lengths[0])
        if lengths[2] != self.shape[2] or not lengths[0] * lengths[1]:
            return None
        if self._down and tiles * self._tile == self._plane and planes.start % PLANES == planes.stop % PLANES == 0:
            return self._rows.runs(self._sections(planes))
        first, run = self._first + hidden.start * self._tile, tiles * self._tile
        slots = slice(planes.start // PLANES, -(-planes.stop // PLANES))
        if (stored := self._rows.runs((slots, slice(first, first + run)))) is None:
            return None
        places = (stored.places[:, None] + np.arange(PLANES) * self._plane).reshape(-1)[planes.start % PLANES :]
        places = places[: planes.stop - planes.start]
        if self._down:
            return stored._replace(places=places)
        scatter = _by_hidden(tiles, len(places), self._tile)
        return stored._replace(places=places, scatter=scatter) if tiles <= MOST_SEGMENTS else None

    def _sections(self, planes: slice) -> tuple[slice, slice]:
        slots = slice(planes.start // PLANES, planes.stop // PLANES)
        return slots, slice(self._first, self._first + PLANES * self._plane)

    def _read_sections(self, planes: slice, by_channel: npt.NDArray[np.void]) -> None:
        """Fill `[planes, hidden tiles]` from whole sections, as many at a time as the scratch holds."""
        slots, columns = self._sections(planes)
        band = min(max(SCRATCH_BYTES // (PLANES * self._plane), 1), slots.stop - slots.start)
        scratch = np.empty(band * PLANES * self._plane, dtype=np.uint8)
        for first in range(slots.start, slots.stop, band):
            end = min(first + band, slots.stop)
            sections = scratch[: (end - first) * PLANES * self._plane]
            self._rows.read_box((slice(first, end), columns), sections)
            place = slice(PLANES * (first - slots.start), PLANES * (end - slots.start))
            by_channel[place] = sections.view(by_channel.dtype).reshape(-1, by_channel.shape[1])

    def _read_planes(self, planes: slice, hidden: slice, by_channel: npt.NDArray[np.void]) -> None:
        """Fill `[planes, hidden tiles]` from parts of planes: the low ones of many slots, then the high ones.

        A part of a plane is one run of a row, so that a band is one read of many runs.
        """
        run = by_channel.shape[1] * self._tile
        band = max(SCRATCH_BYTES // run, 1)
        for high in range(PLANES):
            places = range((high - planes.start) % PLANES, planes.stop - planes.start, PLANES)
            first = self._first + high * self._plane + hidden.start * self._tile
            for start in range(0, len(places), band):
                part = places[start : start + band]
                slot = (planes.start + part[0]) // PLANES
                runs = np.empty(len(part) * run, dtype=np.uint8)
                self._rows.read_box((slice(slot, slot + len(part)), slice(first, first + run)), runs)
                by_channel[part.start : part.stop : PLANES] = runs.view(by_channel.dtype).reshape(len(part), -1)


@lru_cache(maxsize=16)
def _by_hidden(hidden: int, planes: int, tile: int) -> npt.NDArray[np.int64]:
    """`[planes, hidden tiles] int64`: where the tiles of planes go in `[hidden tiles, planes]`."""
    places = (np.arange(hidden) * planes + np.arange(planes)[:, None]) * tile
    places.setflags(write=False)
    return places


def linear_view(
    source: TrellisSource,
    weights: TrellisWeights,
    expert: int,
    projection: int,
    offsets: npt.NDArray[np.int64] | None = None,
) -> ArrayView:
    """The codes of one linear as `[k_tiles, n_tiles, 16*K] int16`, whatever their layout; they stay where they are.

    Args:
        source: the layer.
        weights: its arrays.
        expert: index.
        projection: index into the geometry's projections.
        offsets: `section_offsets(source)`, where a caller has them; only slot-major codes need them.
    """
    if not isinstance(weights.codes, ArrayView):
        return weights.code_view(expert, projection)
    places = section_offsets(source) if offsets is None else offsets
    projections = source.geometry.projections
    return SlotLinear(
        weights.codes,
        int(places[expert * len(projections) + projection]),
        source.geometry.padded_hidden_size // TILE,
        source.rates.rate(expert, projection),
        down=projections[projection] is Projection.DOWN,
    )


class LinearReader:
    """Reads the linears of a share.

    Args:
        source: the layer.
        weights: its arrays.
        extent: the share, inside the source's extent.
    """

    def __init__(self, source: TrellisSource, weights: TrellisWeights, extent: TrellisExtent) -> None:
        self._source, self._weights = source, weights
        self._offsets = section_offsets(source) if isinstance(weights.codes, ArrayView) else None
        first = source.extent.first_channel
        self._share = slice((extent.first_channel - first) // TILE, (extent.end_channel - first) // TILE)
        self._known: dict[tuple[int, int, int, int | None], tuple[FileRuns | None, int]] = {}
        self._down = [projection is Projection.DOWN for projection in source.geometry.projections]

    def read(
        self, expert: int, projection: int, out: npt.NDArray[np.uint8], first: int = 0, end: int | None = None
    ) -> None:
        """Read rows of tiles [first, end) of one linear's share.

        Args:
            expert: index.
            projection: index into the geometry's projections.
            out: `[bytes] uint8`, exactly as many as the rows have; filled as `[rows, n_tiles, 16*K] int16`.
            first: first row, counted from the share's first.
            end: row past the last (default: the share's end).

        Raises:
            FormatValueError: if the buffer has another size, rows are outside the share, or a file is short or changed.
        """
        view, box = self._box(expert, projection, first, end)
        view.read_box(box, out)

    def runs(self, expert: int, projection: int, first: int = 0, end: int | None = None) -> FileRuns | None:
        """Where rows of tiles lie in a file, and where they go in the order of `read`; None where that is not told.

        Raises:
            FormatValueError: if rows are outside the share.
        """
        if self._offsets is None:
            view, box = self._box(expert, projection, first, end)
            return view.runs(box)
        place = int(self._offsets[expert * len(self._down) + projection])
        key = (projection, self._source.rates.half_bits_of(expert, projection), first, end)
        if key not in self._known:  # experts of one rate differ in where their sections begin
            view, box = self._box(expert, projection, first, end)
            self._known[key] = view.runs(box), place
        runs, known_place = self._known[key]
        return None if runs is None else runs._replace(begin=runs.begin + place - known_place)

    def starts(self) -> tuple[list[ShardReader], npt.NDArray[np.int64]] | None:
        """Where each linear begins: `[experts * projections]` files and `int64` bytes; None unless all lie in files.

        Runs of linears of one projection and rate differ in nothing else.
        """
        codes, readers, begins = self._weights.codes, list[ShardReader](), list[int]()
        if isinstance(codes, tuple):
            for row in codes:
                for view in row:
                    if not isinstance(view, FileArray):
                        return None
                    readers.append(view.reader)
                    begins.append(view.entry.begin)
            return readers, np.array(begins, dtype=np.int64)
        whole = codes.runs((slice(0, codes.shape[0]), slice(0, codes.shape[1])))
        if whole is None or self._offsets is None:
            return None
        return [whole.reader] * (len(self._offsets) - 1), whole.begin + self._offsets[:-1]

    def _box(
        self, expert: int, projection: int, first: int, end: int | None
    ) -> tuple[ArrayView, tuple[slice, slice, slice]]:
        if isinstance(self._weights.codes, tuple):  # the question that is asked fast, and for every linear
            view = self._weights.codes[expert][projection]
        else:
            view = linear_view(self._source, self._weights, expert, projection, self._offsets)
        k, n, words = view.shape
        if self._down[projection]:
            start, stop, columns = self._share.start, self._share.stop, slice(0, n)
        else:
            start, stop, columns = 0, k, self._share
        last = stop - start if end is None else end
        if not 0 <= first <= last <= stop - start:
            raise FormatValueError(f"rows {first}..{last} of tiles are outside the share's 0..{stop - start}")
        return view, (slice(start + first, start + last), columns, slice(0, words))
