"""Owns how a layer's codes become the rows of a slot-major tensor on disk, whichever way they lie.

It must not know containers.  Rows that are rows already are copied in bands.  Linears are read one after another, each
once and whole, and their sections written to every row: reading them in bands of rows instead would take pieces of a
few hundred bytes, which is ten times slower where a layer has gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatValueError
from trellis_format.files.arrays import ArrayView
from trellis_format.slots import iterate_rows, read_rows, section_offsets
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.writer import PlannedTensor

__all__ = ["plan_codes", "scatter_sections"]


def plan_codes(source: TrellisSource, weights: TrellisWeights, row_stride: int) -> PlannedTensor:
    """Plan the tensor `codes`, `[slots, row_stride] uint8`.

    Args:
        source: the layer.
        weights: its arrays.
        row_stride: bytes of a row with padding, which is zeros; at least `trellis_format.slots.row_bytes`.

    Raises:
        FormatValueError: if rows do not fit the stride; while it is written, if a file is short or changed.
    """
    payload = int(section_offsets(source)[-1])
    if row_stride < payload:
        raise FormatValueError(f"rows of {payload} bytes do not fit a stride of {row_stride} bytes")
    shape = (source.extent.slot_count, row_stride)
    if isinstance(weights.codes, ArrayView):
        return PlannedTensor("codes", "U8", shape, lambda: iterate_rows(source, weights, row_stride))
    return PlannedTensor("codes", "U8", shape, pieces=lambda: scatter_sections(source, weights, row_stride))


def scatter_sections(
    source: TrellisSource, weights: TrellisWeights, row_stride: int
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The sections of every linear in turn.

    Args:
        source: the layer.
        weights: its arrays.
        row_stride: bytes of a row with padding.

    Yields:
        Byte offset in the rows, and the `[bytes] uint8` that lie there.
    """
    offsets = section_offsets(source)
    projections = len(source.geometry.projections)
    for index in range(len(offsets) - 1):
        for slot, section in enumerate(read_rows(source, weights, *divmod(index, projections))):
            yield slot * row_stride + int(offsets[index]), section
