"""Owns the way of other libraries' arrays into numpy: the same memory, on the CPU.  It must not import any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import ArrayView, MemoryArray

__all__ = ["as_array", "as_view"]

_DLPACK_CPU = 1
_REFUSALS = (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError)  # of the exporter


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """An array of numpy, or of any library that shares memory by DLPack, as numpy without a copy.

    Args:
        name: what it is, for errors.
        value: the array.

    Raises:
        FormatTypeError: if it is no array, or one that numpy cannot share, such as of bfloat16 or without memory.
        FormatValueError: if it is not on the CPU.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not hasattr(value, "__dlpack_device__"):
        raise FormatTypeError(f"{name} must be an array, got {type(value).__name__}")
    try:
        device, index = (int(number) for number in value.__dlpack_device__())
    except _REFUSALS as error:
        raise _not_shared(name, value, error) from error
    if device != _DLPACK_CPU:
        raise FormatValueError(f"{name} must be on the CPU, got DLPack device type {device}, index {index}")
    try:
        shared: npt.NDArray[Any] = np.from_dlpack(value)
    except _REFUSALS as error:
        raise _not_shared(name, value, error) from error
    return shared


def _not_shared(name: str, value: Any, error: Exception) -> FormatTypeError:
    dtype = getattr(value, "dtype", type(value).__name__)
    return FormatTypeError(f"{name} must be an array that numpy can share by DLPack, got {dtype}: {error}")


def as_view(name: str, value: Any) -> ArrayView:
    """The same as a view, which may also lie in a file; raises as `as_array`."""
    return value if isinstance(value, ArrayView) else MemoryArray(as_array(name, value))
