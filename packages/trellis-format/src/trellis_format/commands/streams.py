"""Owns how a command of this package ends and writes: exit codes, JSON, progress.  It must not know what it writes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trellis_format import terminal
from trellis_format.errors import FormatArgumentError, FormatError, FormatNotFoundError, FormatUnsupportedError

__all__ = [
    "EXIT_ERRORS",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_UNUSABLE",
    "PROGRAM",
    "complain",
    "counted",
    "emit",
    "emit_json",
    "progress",
    "refuse",
]

PROGRAM = "trellis-format"
"""Name of the command."""
EXIT_OK = 0
"""Nothing is wrong."""
EXIT_ERRORS = 1
"""A file breaks a rule, or holds what is refused with the reason."""
EXIT_UNUSABLE = 2
"""A path cannot be opened, read or written or holds no checkpoint, or the command is used wrongly."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as a shell counts it."""


def refuse(error: FormatError, *, out: str | os.PathLike[str] | None = None) -> int:
    """Write an error to stderr; returns `EXIT_ERRORS` where a file's content is at fault, else `EXIT_UNUSABLE`.

    Args:
        error: what ended the command.
        out: the path that was to be written; what is wrong there is no fault of the checkpoint.
    """
    complain(str(error))
    if isinstance(error, FormatArgumentError | FormatNotFoundError) or isinstance(error.__cause__, OSError):
        return EXIT_UNUSABLE
    if out is not None and error.file is not None and not isinstance(error, FormatUnsupportedError):
        target, file = Path(os.path.abspath(out)), Path(os.path.abspath(error.file))
        partial = target.with_name(f".{target.name}.partial") if target.name else target
        if {target, partial} & {file, *file.parents}:
            return EXIT_UNUSABLE
    return EXIT_ERRORS


def emit(write: Callable[[], object], code: int) -> int:
    """Write to stdout; returns `code`, also where the reader stops reading, else `EXIT_UNUSABLE`."""
    return terminal.emit(PROGRAM, write, code, unwritable=EXIT_UNUSABLE)


def emit_json(value: object, code: int) -> int:
    """Write indented ASCII JSON to stdout, which no terminal takes for anything else."""
    return emit(lambda: sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n"), code)


def complain(message: str) -> None:
    """Write one line to stderr."""
    terminal.complain(PROGRAM, message)


@contextmanager
def progress(title: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while bytes are worked through, where stderr is a terminal and rich is installed.

    Args:
        title: what goes on.
        show: False for none.

    Yields:
        A function to call with the bytes that are done so far and the bytes in all.
    """
    bar = None
    if show and sys.stderr.isatty():
        try:  # by name at run time: the package is complete without it
            rich, console = importlib.import_module("rich.progress"), importlib.import_module("rich.console")
        except ImportError:  # the extra `cli` brings it
            pass
        else:
            columns = (rich.TextColumn(title), rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn())
            bar = rich.Progress(*columns, rich.TimeRemainingColumn(), console=console.Console(stderr=True))
    if bar is None:
        yield lambda _done, _total: None
        return
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def counted(report: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Turn a function of bytes done and bytes in all into one of the bytes of each piece.

    Args:
        report: takes both.
        total: bytes in all.
    """
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(done, total)

    return advance
