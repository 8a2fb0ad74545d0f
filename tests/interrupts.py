"""Owns a command that is interrupted while a library loads, for the tests of all packages."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["interrupted_start"]

_PROGRAM = """
import builtins, os, signal, sys
load = builtins.__import__
def slow(name, *rest):
    if name == {library!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *rest)
builtins.__import__ = slow
from {module} import main
sys.exit(main({arguments!r}))
"""


def interrupted_start(module: str, arguments: list[str], library: str) -> tuple[int, str, str]:
    """Run `main(arguments)` of a module in its own process, which gets Ctrl-C when it imports `library`.

    Returns:
        Exit code, stdout and stderr.
    """
    program = _PROGRAM.format(module=module, arguments=arguments, library=library)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr
