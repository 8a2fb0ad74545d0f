"""Owns the way of other libraries' arrays into numpy: the same memory, on the CPU.  It must not import any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import ArrayView, MemoryArray

__all__ = ["as_array", "as_view"]

_DLPACK_CPU = 1


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """An array of numpy, or of any library that shares memory by DLPack, as numpy without a copy.

    Args:
        name: what it is, for errors.
        value: the array.

    Raises:
        FormatTypeError: if it is no array.
        FormatValueError: if it is not on the CPU.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not hasattr(value, "__dlpack_device__"):
        raise FormatTypeError(f"{name} must be an array, got {type(value).__name__}")
    device, index = (int(number) for number in value.__dlpack_device__())
    if device != _DLPACK_CPU:
        raise FormatValueError(f"{name} must be on the CPU, got DLPack device type {device}, index {index}")
    shared: npt.NDArray[Any] = np.from_dlpack(value)
    return shared


def as_view(name: str, value: Any) -> ArrayView:
    """The same as a view, which may also lie in a file; raises as `as_array`."""
    return value if isinstance(value, ArrayView) else MemoryArray(as_array(name, value))
