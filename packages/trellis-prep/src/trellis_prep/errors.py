"""Owns the exception types of this package; it must not know what raises them."""

from __future__ import annotations

__all__ = ["PrepError", "PrepTypeError", "PrepUnsupportedError", "PrepValueError"]


class PrepError(Exception):
    """Base of every error that trellis-prep raises on purpose."""


class PrepValueError(PrepError, ValueError):
    """A value breaks a rule; the message has the rule, the observed and the nearest legal value."""


class PrepTypeError(PrepError, TypeError):
    """A value has the wrong type; the message has the observed and the expected one."""


class PrepUnsupportedError(PrepError, NotImplementedError):
    """Well formed and deliberately not handled."""
