"""Owns the start of a command: an interrupt while libraries load is one like any other.  It must not know arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main", "run_command"]

_INTERRUPTED = 130


def run_command(program: str, module: str, arguments: Sequence[str] | None = None) -> int:
    """Load the module of a command and run its `main`.

    Args:
        program: name of the command, for the line that tells of an interrupt.
        module: full name of the module, which may take long to load.
        arguments: those of the command line, without the program; None means those of this process.

    Returns:
        The exit code of the module's `main`; 130 where an interrupt came that it did not answer itself.
    """
    try:
        code: int = importlib.import_module(module).main(arguments)
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted\n")
        return _INTERRUPTED
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trellis-format`.

    Args:
        arguments: those of the command line, without the program; None means those of this process.

    Returns:
        The exit code of `trellis_format.cli.main`; 130 where an interrupt came before that began.
    """
    return run_command("trellis-format", "trellis_format.cli", arguments)
