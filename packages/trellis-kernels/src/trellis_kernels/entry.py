"""Owns the start of the command `trellis-kernels`: an interrupt while libraries load is one like any other.

It must not know arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Load the command and run it.

    Args:
        argv: arguments after the program's name; None means those of this process.

    Returns:
        The exit code of `trellis_kernels.cli.main`; 130 where an interrupt came before that began.
    """
    try:
        from trellis_kernels import cli
    except KeyboardInterrupt:
        sys.stderr.write("trellis-kernels: interrupted\n")
        return 130
    return cli.main(argv)
