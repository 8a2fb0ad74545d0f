"""Owns the start and the end of a command, whatever its streams are and whenever it is interrupted.

It must not know arguments.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence

from trellis_format.terminal import complain, drop_output, open_streams

__all__ = ["main", "run_command"]

_FAILED, _INTERRUPTED = 1, 130
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def run_command(program: str, module: str, arguments: Sequence[str] | None = None) -> int:
    """Load the module of a command and run its `main`.

    Args:
        program: name of the command, for the line that tells of an interrupt.
        module: full name of the module, which may take long to load.
        arguments: those of the command line, without the program; None means those of this process.

    Returns:
        The exit code of the module's `main`; 130 where an interrupt came that it did not answer itself, 1 where it did
        not answer that memory ran out or that stdout cannot be written.
    """
    open_streams()
    try:
        code: int = importlib.import_module(module).main(arguments)
        sys.stdout.flush()  # here, where a failure can be told
    except KeyboardInterrupt:
        complain(program, "interrupted")
        return _INTERRUPTED
    except MemoryError as error:
        complain(program, f"out of memory: {error}" if str(error) else "out of memory")
        return _FAILED
    except BrokenPipeError:
        drop_output()  # its reader went away; nothing is left to say
        return _FAILED
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        drop_output()
        complain(program, f"stdout cannot be written: {error.strerror}")
        return _FAILED
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trellis-format`.

    Args:
        arguments: those of the command line, without the program; None means those of this process.

    Returns:
        The exit code of `trellis_format.cli.main`; 130 where an interrupt came before that began.
    """
    return run_command("trellis-format", "trellis_format.cli", arguments)
