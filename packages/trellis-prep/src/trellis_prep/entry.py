"""Owns the start of the command `trellis-prep`: an interrupt while libraries load is one like any other.

It must not know arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the command and run it.

    Args:
        arguments: those of the command line, without the program; default: `sys.argv`.

    Returns:
        The exit code of `trellis_prep.cli.main`; 130 where an interrupt came before that began.
    """
    try:
        from trellis_prep import cli
    except KeyboardInterrupt:
        sys.stderr.write("trellis-prep: interrupted\n")
        return 130
    return cli.main(arguments)
