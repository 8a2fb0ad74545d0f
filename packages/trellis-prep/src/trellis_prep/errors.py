"""Owns the exception types of this package; it must not know what raises them."""

from __future__ import annotations

from trellis_format.errors import FormatValueError

__all__ = [
    "PrepDeviceError",
    "PrepError",
    "PrepMemoryError",
    "PrepReadError",
    "PrepStateError",
    "PrepTypeError",
    "PrepValueError",
]


class PrepError(Exception):
    """Base of every error that trellis-prep raises on purpose."""


class PrepValueError(PrepError, ValueError):
    """A value breaks a rule; the message has the rule, the observed and the nearest legal value."""


class PrepTypeError(PrepError, TypeError):
    """A value has the wrong type; the message has the observed and the expected one."""


class PrepStateError(PrepError, RuntimeError):
    """A call at the wrong moment: a slot that is not lent, or preparation while a CUDA graph is captured."""


class PrepMemoryError(PrepError, MemoryError):
    """Memory could not be had; the message has the bytes, what they were for, and where."""


class PrepDeviceError(PrepError, RuntimeError):
    """A copy to the device failed; the message has what was copied."""


class PrepReadError(PrepValueError, FormatValueError):
    """A weight could not be read; the message has file and tensor where they exist, and expert and projection.

    Attributes:
        message: what is wrong, without the file and the tensor.
        file: path of the file at fault, or None.
        tensor: name of the tensor at fault, or None.
    """
