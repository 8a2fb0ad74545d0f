"""Owns how tests across packages run the command: as a process, and in this process where many runs are wanted.

It must not know checkpoints.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trellis_moe.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a run of the command gave."""

    code: int
    out: str
    err: str


_PATHS = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # before a test leaves its folder


def run_process(*arguments: object, env: Mapping[str, str] | None = None, shell: str = "") -> Outcome:
    """Run `python -m trellis_moe`; `shell` is what a shell would be given after the arguments."""
    words = [sys.executable, "-m", "trellis_moe", *map(str, arguments)]
    if shell:
        words = ["bash", "-c", f'"$@" {shell}', "bash", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _PATHS, **(env or {})}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_here(*arguments: object) -> Outcome:
    """Run the command's main function in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = int(error.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every path under a folder, with the bytes of files, so that nothing left behind is missed."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}
