"""Owns how a command's words reach stdout and stderr, which may lack characters, close or be absent.

It must not know what is written.  Names come from foreign files, so whatever a terminal might obey is escaped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

__all__ = ["complain", "drop_output", "emit", "keep_printing", "open_streams", "printable"]

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode's control, format (bidirectional too), surrogate, private and unassigned characters, and line breaks."""


def printable(text: str) -> str:
    """Text with every character that a terminal might obey written as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii") if unicodedata.category(character) in _UNSAFE else character
        for character in text
    )


def complain(program: str, message: str) -> None:
    """Write one line to stderr, where there is one.

    Args:
        program: name of the command, which the line begins with.
        message: what to tell; it is escaped.
    """
    if sys.stderr is not None:
        sys.stderr.write(f"{program}: {printable(message)}\n")


def open_streams() -> None:
    """Open nothing where the process began without stdin, stdout or stderr.

    Otherwise the next file that is opened has a stream's number, and what a library writes to stderr goes into it.
    """
    while True:
        sink = os.open(os.devnull, os.O_RDWR)
        if sink > 2:
            os.close(sink)
            break
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for as long as the process


def keep_printing(stream: TextIO | None) -> None:
    """Escape what the stream's encoding lacks: a name must not end the report."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Send what stdout still buffers nowhere, or the interpreter would try again at its end, and fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is absent, closed or no file
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, sys.stdout.fileno())
        finally:
            os.close(sink)


def emit(program: str, write: Callable[[], object], code: int, *, unwritable: int) -> int:
    """Write to stdout.

    Args:
        program: name of the command.
        write: writes.
        code: exit code where all was written, or the reader stopped reading.
        unwritable: exit code where stdout cannot be written for another reason, which stderr then tells.

    Returns:
        One of the two codes.
    """
    try:
        write()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure can be told
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        complain(program, f"stdout cannot be written: {error.strerror or error}")
        return unwritable
    return code
