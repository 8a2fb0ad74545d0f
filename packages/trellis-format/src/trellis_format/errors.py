"""Owns the exception types of this package; knows nothing of what raises them.

Each class pairs the package's own base with the built-in that callers already catch: a wrong value, a wrong type,
something that is well formed but not supported, and a path that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike

__all__ = [
    "MAX_MESSAGE_CHARACTERS",
    "MAX_VALUE_CHARACTERS",
    "FormatArgumentError",
    "FormatError",
    "FormatNotFoundError",
    "FormatTypeError",
    "FormatUnsupportedError",
    "FormatValueError",
    "bounded",
    "in_file",
]


MAX_VALUE_CHARACTERS = 200
"""Most characters that a message shows of one name or value: a stranger chose them, and their length."""
MAX_MESSAGE_CHARACTERS = 4000
"""Most characters of a message without its place."""

# A value is in quotes, or has no space; what is longer than the bound, quotes included, is cut inside.
_LONG_VALUES = re.compile(
    rf"(?<!\w)(['\"])(?:(?!\1).){{{MAX_VALUE_CHARACTERS},}}\1|\S{{{MAX_VALUE_CHARACTERS + 1},}}", re.DOTALL
)


class FormatError(Exception):
    """Base of every error that trellis-format raises on purpose.

    Attributes:
        message: what is wrong, without the place.
        file: path of the file at fault, or None.
        tensor: name of the tensor at fault, or None; cut like the values in the message, with its length told.
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
        message = bounded(message)
        tensor = None if tensor is None else _cut(tensor, MAX_VALUE_CHARACTERS)
        where = "".join(f"{part}: " for part in (str(file) if file else "", tensor or "") if part)
        super().__init__(where + message)
        self.message = message
        self.file = str(file) if file else None
        self.tensor = tensor
        self.numbers = dict(numbers or {})


class FormatValueError(FormatError, ValueError):
    """A value breaks a rule of the format; the message has the rule, the observed and the legal value."""


class FormatArgumentError(FormatValueError):
    """A caller's argument is not usable, whatever the files hold: no checkpoint at the path, a name not known."""


class FormatTypeError(FormatError, TypeError):
    """A value has the wrong type or dtype; the message has the observed and the expected one."""


class FormatUnsupportedError(FormatError, NotImplementedError):
    """Well formed, recognised, and deliberately not handled; the message names the dialect."""


class FormatNotFoundError(FormatError, FileNotFoundError):
    """A file or directory that must exist does not."""

    def __str__(self) -> str:  # OSError would format its (missing) errno instead of the message
        return str(self.args[0])


@contextmanager
def in_file(file: str | PathLike[str]) -> Iterator[None]:
    """Name a file in errors that know none, such as those of a check that arrays in memory take too.

    Args:
        file: path of the file that the arrays came from.
    """
    try:
        yield
    except FormatError as error:
        if error.file is not None:
            raise
        raise type(error)(error.message, file=file, tensor=error.tensor, numbers=error.numbers) from error


def bounded(message: str) -> str:
    """A message with each long value cut and its length told, and so the whole.

    A value is text in quotes or without a space; the bounds are `MAX_VALUE_CHARACTERS` and `MAX_MESSAGE_CHARACTERS`.
    """
    if len(message) <= MAX_VALUE_CHARACTERS:
        return message
    message = _cut(message, 16 * MAX_MESSAGE_CHARACTERS)  # before the search, whose time grows with it
    return _cut(_LONG_VALUES.sub(lambda found: _cut(found[0], MAX_VALUE_CHARACTERS), message), MAX_MESSAGE_CHARACTERS)


def _cut(text: str, bound: int) -> str:
    """Text of at most `bound` characters; of longer text the beginning, and how long it is."""
    if len(text) <= bound:
        return text
    told = f" ... ({len(text)} characters)"
    return text[: bound - len(told)] + told
