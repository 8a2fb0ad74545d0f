"""Owns the slot-major layout of codes, and the way between it and linears.  It must not know files or devices.

A row holds what the 32 intermediate channels of one slot are multiplied by: for each expert the sections of its
projections.  A section is the tiles of the slot's first 16 channels (the low plane), then those of the second 16 (the
high plane), hidden tiles ascending in each.  Tiles are the same bytes as in a linear `[k_tiles, n_tiles, 16*K]`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatValueError
from trellis_format.extent import SLOT, TrellisExtent
from trellis_format.files.arrays import ArrayView
from trellis_format.files.boxes import take_box
from trellis_format.rates import TILE, Rate
from trellis_format.source import Projection, TrellisSource, TrellisWeights

__all__ = [
    "BAND_BYTES",
    "PLANES",
    "iterate_rows",
    "linear_to_rows",
    "read_linear",
    "read_rows",
    "row_bytes",
    "rows_to_linear",
    "section_bytes",
    "section_offsets",
]

BAND_BYTES = 128 << 20
"""Bytes of rows that `iterate_rows` puts together at a time, unless one row is longer."""
PLANES = SLOT // TILE
"""Tiles of a slot along the intermediate axis."""


def section_bytes(hidden_size: int, rate: Rate) -> int:
    """Bytes of one expert's projection in one row: (H/16) * 64 K."""
    return hidden_size // TILE * PLANES * rate.tile_bytes


def section_offsets(source: TrellisSource) -> npt.NDArray[np.int64]:
    """`[experts * projections + 1] int64`: first byte of each section in a row, and the end of the last.

    Sections are ordered by expert, then by projection.
    """
    geometry = source.geometry
    table = np.array(source.rates.half_bits, dtype=np.int64)
    half_bits = np.broadcast_to(table, (geometry.num_experts, len(geometry.projections)))
    unit = section_bytes(geometry.padded_hidden_size, Rate(2)) // 2  # bytes for each half bit
    return np.concatenate(([0], np.cumsum(half_bits * unit)))


def row_bytes(source: TrellisSource) -> int:
    """Bytes of a row without padding."""
    return int(section_offsets(source)[-1])


def linear_to_rows(tiles: npt.NDArray[np.int16], *, down: bool) -> npt.NDArray[np.uint8]:
    """A linear's tiles as sections.

    Args:
        tiles: `[k_tiles, n_tiles, 16*K] int16`.
        down: whether the intermediate axis is k (down) or n (gate, up).

    Returns:
        `[slots, section bytes] uint8`, for down a view.

    Raises:
        FormatValueError: if the intermediate axis is not in whole slots.
    """
    by_channel = tiles if down else tiles.swapaxes(0, 1)
    intermediate, hidden, words = by_channel.shape
    if intermediate % PLANES:
        raise FormatValueError(f"{intermediate} tiles of {TILE} channels are not whole slots of {SLOT} channels")
    rows = np.ascontiguousarray(by_channel).reshape(intermediate // PLANES, PLANES * hidden * words)
    return rows.view(np.uint8)


def rows_to_linear(rows: npt.NDArray[np.uint8], rate: Rate, *, down: bool) -> npt.NDArray[np.int16]:
    """Sections as a linear's tiles; the inverse of `linear_to_rows`.

    Args:
        rows: `[slots, section bytes] uint8`.
        rate: K.
        down: whether the intermediate axis is k (down) or n (gate, up).

    Returns:
        `[k_tiles, n_tiles, 16*K] int16`.

    Raises:
        FormatValueError: if a section is not whole tiles in two planes.
    """
    slots, size = rows.shape
    if size % (PLANES * rate.tile_bytes):
        raise FormatValueError(f"section of {size} bytes is not {PLANES} planes of tiles of {rate.tile_bytes} bytes")
    words = np.ascontiguousarray(rows).view(np.int16)
    by_channel = words.reshape(slots * PLANES, size // (PLANES * rate.tile_bytes), rate.tile_words16)
    return by_channel if down else np.ascontiguousarray(by_channel.swapaxes(0, 1))


def read_linear(
    source: TrellisSource,
    weights: TrellisWeights,
    expert: int,
    projection: int,
    extent: TrellisExtent | None = None,
) -> npt.NDArray[np.int16]:
    """One linear's share as tiles, whatever the layout of the codes.

    Args:
        source: the layer.
        weights: its arrays.
        expert: index.
        projection: index into the geometry's projections.
        extent: the share, inside the source's extent (default: all of it).

    Returns:
        `[k_tiles, n_tiles, 16*K] int16`, with the intermediate axis cut to the share.

    Raises:
        FormatValueError: if a file is short or changed, or rows are too short for their sections.
    """
    share = extent or source.extent
    down = source.geometry.projections[projection] is Projection.DOWN
    if isinstance(weights.codes, ArrayView):
        rows = read_rows(source, weights, expert, projection, share)
        return rows_to_linear(rows, source.rates.rate(expert, projection), down=down)
    view = weights.code_view(expert, projection)
    tiles: npt.NDArray[np.int16] = take_box(view, _linear_box(source, view, share, down=down)).read()
    return tiles


def read_rows(
    source: TrellisSource, weights: TrellisWeights, expert: int, projection: int, extent: TrellisExtent | None = None
) -> npt.NDArray[np.uint8]:
    """One linear's share as sections, whatever the layout of the codes.

    Args:
        source: the layer.
        weights: its arrays.
        expert: index.
        projection: index into the geometry's projections.
        extent: the share, inside the source's extent (default: all of it).

    Returns:
        `[slots, section bytes] uint8`.

    Raises:
        FormatValueError: as `read_linear`.
    """
    share = extent or source.extent
    codes = weights.codes
    if not isinstance(codes, ArrayView):
        down = source.geometry.projections[projection] is Projection.DOWN
        return linear_to_rows(read_linear(source, weights, expert, projection, share), down=down)
    rows: npt.NDArray[np.uint8] = take_box(codes, _section_box(source, expert, projection, share)).read()
    return rows


def _section_box(source: TrellisSource, expert: int, projection: int, extent: TrellisExtent) -> tuple[slice, slice]:
    offsets = section_offsets(source)
    index = expert * len(source.geometry.projections) + projection
    first = extent.first_slot - source.extent.first_slot
    return slice(first, first + extent.slot_count), slice(int(offsets[index]), int(offsets[index + 1]))


def _linear_box(source: TrellisSource, view: ArrayView, extent: TrellisExtent, *, down: bool) -> tuple[slice, ...]:
    first = source.extent.first_channel
    box = [slice(0, size) for size in view.shape]
    box[0 if down else 1] = slice((extent.first_channel - first) // TILE, (extent.end_channel - first) // TILE)
    return tuple(box)


def iterate_rows(
    source: TrellisSource, weights: TrellisWeights, row_stride: int, *, band_bytes: int = BAND_BYTES
) -> Iterator[npt.NDArray[np.uint8]]:
    """All rows of a layer in order, whatever the layout of its codes, a band of whole rows at a time.

    Args:
        source: the layer.
        weights: its arrays.
        row_stride: bytes of a row with padding, at least `row_bytes`; what is added is zeros.
        band_bytes: bytes of rows to hold; one row is held in any case.

    Yields:
        `[rows * row_stride] uint8`, the same buffer each time.

    Raises:
        FormatValueError: if rows do not fit the stride, or a file is short or changed.
    """
    offsets = section_offsets(source)
    if row_stride < offsets[-1]:
        raise FormatValueError(f"rows of {offsets[-1]} bytes do not fit a stride of {row_stride} bytes")
    first, slots = source.extent.first_slot, source.extent.slot_count
    band = min(max(band_bytes // row_stride, 1), slots)
    buffer = np.zeros((band, row_stride), dtype=np.uint8)
    projections = len(source.geometry.projections)
    for start in range(0, slots, band):
        rows = buffer[: min(band, slots - start)]
        share = TrellisExtent(
            global_intermediate_size=source.extent.global_intermediate_size,
            first_slot=first + start,
            slot_count=len(rows),
        )
        for index in range(len(offsets) - 1):
            sections = read_rows(source, weights, *divmod(index, projections), share)
            rows[:, offsets[index] : offsets[index + 1]] = sections
        yield rows.reshape(-1)
