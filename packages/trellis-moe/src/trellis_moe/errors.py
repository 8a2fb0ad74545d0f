"""Owns the exception types of this package; it must not know what raises them."""

from __future__ import annotations

__all__ = [
    "MoeDistributedError",
    "MoeError",
    "MoeMemoryError",
    "MoeTypeError",
    "MoeUnsupportedError",
    "MoeValueError",
]


class MoeError(Exception):
    """Base of every error that trellis-moe raises on purpose."""


class MoeValueError(MoeError, ValueError):
    """A value breaks a rule; the message has the rule, the observed and the legal value."""


class MoeTypeError(MoeError, TypeError):
    """A value has the wrong type, dtype or device; the message has the observed and the expected one."""


class MoeUnsupportedError(MoeError, NotImplementedError):
    """Well formed and deliberately not planned; the message names the combination and what is supported."""


class MoeMemoryError(MoeError, MemoryError):
    """Memory could not be had; the message has what it was for, and where."""


class MoeDistributedError(MoeError, RuntimeError):
    """A collective failed or did not end in time; the message has the rank, the ranks, and what was under way."""
