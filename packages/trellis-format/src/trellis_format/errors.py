"""Owns the exception types of this package; knows nothing of what raises them.

Each class pairs the package's own base with the built-in that callers already catch: a wrong value, a wrong type,
something that is well formed but not supported, and a path that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

__all__ = [
    "FormatError",
    "FormatNotFoundError",
    "FormatTypeError",
    "FormatUnsupportedError",
    "FormatValueError",
]


class FormatError(Exception):
    """Base of every error that trellis-format raises on purpose.

    Attributes:
        message: what is wrong, without the place.
        file: path of the file at fault, or None.
        tensor: name of the tensor at fault, or None.
        numbers: the numbers of the message by what they are, such as `observed` and `expected`; empty without any.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | PathLike[str] | None = None,
        tensor: str | None = None,
        numbers: Mapping[str, int | float] | None = None,
    ) -> None:
        where = "".join(f"{part}: " for part in (str(file) if file else "", tensor or "") if part)
        super().__init__(where + message)
        self.message = message
        self.file = str(file) if file else None
        self.tensor = tensor
        self.numbers = dict(numbers or {})


class FormatValueError(FormatError, ValueError):
    """A value breaks a rule of the format; the message has the rule, the observed and the legal value."""


class FormatTypeError(FormatError, TypeError):
    """A value has the wrong type or dtype; the message has the observed and the expected one."""


class FormatUnsupportedError(FormatError, NotImplementedError):
    """Well formed, recognised, and deliberately not handled; the message names the dialect."""


class FormatNotFoundError(FormatError, FileNotFoundError):
    """A file or directory that must exist does not."""

    def __str__(self) -> str:  # OSError would format its (missing) errno instead of the message
        return str(self.args[0])
