"""Owns parts of arrays that stay where they are.  It must not know what an array means."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.files.arrays import ArrayView, FileRuns, MemoryArray

__all__ = ["BoxArray", "take_box"]


class BoxArray(ArrayView):
    """A box of another array, read through it.

    Args:
        whole: the array.
        box: one slice of step 1 per axis.

    Raises:
        FormatValueError: if the box is outside the array.
    """

    def __init__(self, whole: ArrayView, box: tuple[slice, ...]) -> None:
        self.shape = whole.box_shape(box)
        self.dtype = whole.dtype
        self._whole = whole
        self._origin = tuple(part.start or 0 for part in box)

    def read(self) -> npt.NDArray[Any]:
        """The whole box, freshly read."""
        flat = np.empty(self.nbytes, dtype=np.uint8)
        self.read_box(tuple(slice(0, size) for size in self.shape), flat)
        return flat.view(self.dtype).reshape(self.shape)

    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        """Read a box of the box into a buffer; see `ArrayView.read_box`."""
        self._whole.read_box(self._shifted(box, self._check_out(box, out)), out)

    def runs(self, box: tuple[slice, ...]) -> FileRuns | None:
        """Where the bytes of a box of the box lie; see `ArrayView.runs`."""
        return self._whole.runs(self._shifted(box, self.box_shape(box)))

    def _shifted(self, box: tuple[slice, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
        starts = (origin + (part.start or 0) for origin, part in zip(self._origin, box, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, lengths, strict=True))


def take_box(array: ArrayView, box: tuple[slice, ...]) -> ArrayView:
    """A part of an array without a copy: the same storage in memory, the same bytes of a file.

    Args:
        array: the array.
        box: one slice of step 1 per axis.

    Raises:
        FormatValueError: if the box is outside the array.
    """
    if not isinstance(array, MemoryArray):
        return BoxArray(array, box)
    array.box_shape(box)
    return MemoryArray(array.read()[box])
