"""Owns the start of the command `trellis-kernels`: an interrupt while libraries load is one like any other.

It must not know arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from trellis_format.entry import run_command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the command and run it.

    Args:
        arguments: those of the command line, without the program; None means those of this process.

    Returns:
        The exit code of `trellis_kernels.cli.main`; 130 where an interrupt came before that began.
    """
    return run_command("trellis-kernels", "trellis_kernels.cli", arguments)
