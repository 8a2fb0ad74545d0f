"""Owns the exception types of this package; knows nothing of what raises them.

Each class pairs the package's own base with the built-in that callers already catch.
"""

from __future__ import annotations

__all__ = ["ColdKernelError", "KernelError", "KernelTypeError", "KernelUnsupportedError", "KernelValueError"]


class KernelError(Exception):
    """Base of every error that trellis-kernels raises on purpose."""


class KernelValueError(KernelError, ValueError):
    """A value breaks a rule of a kernel; the message has the rule, the observed and the legal value."""


class KernelTypeError(KernelError, TypeError):
    """A value has the wrong type, dtype or device; the message has the observed and the expected one."""


class KernelUnsupportedError(KernelError, NotImplementedError):
    """Well formed, and deliberately not handled: a device, a package that is not installed."""


class ColdKernelError(KernelError, RuntimeError):
    """A kernel was launched where it may not be compiled; the message has its key."""
