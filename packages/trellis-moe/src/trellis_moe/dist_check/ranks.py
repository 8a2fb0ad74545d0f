"""Owns this process as one of the ranks of a check: its device, its group, and its end.  It must not know layers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trellis_moe.errors import MoeValueError

__all__ = ["Process", "join_ranks", "leave_at_once"]

_WATCHDOG_FACTOR = 10  # torch ends the process itself after so many timeouts, should this program not


@dataclass(frozen=True)
class Process:
    """One rank.

    Attributes:
        rank: of all.
        world: ranks.
        device: of this one.
        timeout: seconds that a collective may take.
        captures: whether CUDA graphs can hold its collectives.
    """

    rank: int
    world: int
    device: torch.device
    timeout: float
    captures: bool

    @property
    def leads(self) -> bool:
        """Whether this rank reports."""
        return self.rank == 0

    def say(self, line: str) -> None:
        """One line on stderr, of the first rank alone."""
        if self.leads:
            print(f"dist_check: {line}", file=sys.stderr, flush=True)


@contextmanager
def join_ranks(device: str | None, timeout: float, *, share_gpus: bool = False) -> Iterator[Process]:
    """Join the group that torchrun's environment describes, NCCL on GPUs and gloo on CPUs.

    Args:
        device: `cpu` or `cuda`; None is a GPU for each rank where there are as many.
        timeout: seconds that a collective may take.
        share_gpus: whether ranks may share a GPU, over gloo, through which graphs and times say nothing.

    Raises:
        MoeValueError: if the environment describes none, or there are fewer GPUs than ranks.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise MoeValueError(f"{', '.join(missing)} not set; start the ranks with torchrun or with --launch N")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    place = _place(device, local, world, share_gpus)
    captures = place.type == "cuda" and not share_gpus
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(1)
    seconds = timedelta(seconds=timeout * _WATCHDOG_FACTOR)
    dist.init_process_group("nccl" if captures else "gloo", rank=rank, world_size=world, timeout=seconds)
    yield Process(rank, world, place, timeout, captures)
    dist.destroy_process_group()  # only where all went well: it waits for peers


def _place(device: str | None, local: int, world: int, share_gpus: bool) -> torch.device:
    found = torch.cuda.device_count()
    if share_gpus:
        if not found:
            raise MoeValueError("--share-gpus: torch sees no CUDA device")
        return torch.device("cuda", local % found)
    if device == "cuda" and found < world:
        raise MoeValueError(f"{world} ranks need {world} CUDA devices, torch sees {found}; or give --share-gpus")
    on_gpu = device == "cuda" or (device is None and found >= world)
    return torch.device("cuda", local) if on_gpu else torch.device("cpu")


def leave_at_once(code: int) -> None:
    """End the process without waiting for peers that may be gone.

    Args:
        code: exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
