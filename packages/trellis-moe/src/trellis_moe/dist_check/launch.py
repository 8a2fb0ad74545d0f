"""Owns the start of ranks as processes of this machine, and the judgement on how they ended.

It must not know what ranks do.  torchrun ends all ranks when one dies, so a check of what the others do on their own
cannot use it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["EXIT_LOST", "Ended", "judge_loss", "launch"]

EXIT_LOST = 3
"""Exit code of a rank that found another one gone."""
_POLL_SECONDS = 0.05
_SLACK_SECONDS = 10.0  # to notice, to speak and to end


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: exit code, negative for a signal.
        seconds: from the start of all.
        err: what it wrote to stderr.
    """

    code: int
    seconds: float
    err: str


def launch(world: int, arguments: Sequence[str], *, seconds: float) -> list[Ended]:
    """Run this program once for each rank, and wait for all of them.

    Args:
        world: ranks.
        arguments: of the program.
        seconds: after which those that are left are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "trellis_moe.dist_check", *arguments]
    # a pipe that nobody reads would fill up
    errors = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115  # closed when their text is read
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=errors[rank],
        )
        for rank in range(world)
    ]
    ends: dict[int, float] = {}
    while len(ends) < world:
        for rank, process in enumerate(processes):
            if rank not in ends and process.poll() is not None:
                ends[rank] = time.monotonic() - begin
        if time.monotonic() - begin > seconds:
            for process in processes:
                process.kill()
        time.sleep(_POLL_SECONDS)
    return [Ended(process.returncode, ends[rank], _text(errors[rank])) for rank, process in enumerate(processes)]


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def judge_loss(ended: Sequence[Ended], killed: int, timeout: float) -> list[str]:
    """What is wrong with how ranks ended when one of them was killed; nothing, if nothing is.

    Args:
        ended: of every rank.
        killed: which rank was.
        timeout: seconds in which the others have to find out.
    """
    faults = []
    if ended[killed].code != -signal.SIGKILL:
        faults.append(f"rank {killed} was to be killed and ended with {ended[killed].code}")
    for rank, end in enumerate(ended):
        if rank == killed:
            continue
        if end.code != EXIT_LOST:
            faults.append(f"rank {rank} ended with {end.code}, not {EXIT_LOST}")
        if "rank" not in end.err:
            faults.append(f"rank {rank} did not say what happened")
        after = end.seconds - ended[killed].seconds
        if after > timeout + _SLACK_SECONDS:
            faults.append(f"rank {rank} ended {after:.1f} s after the loss, the timeout is {timeout:g} s")
    return faults
