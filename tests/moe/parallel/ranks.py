"""Owns processes that stand for ranks, over gloo; what each one does is the test's.  It must not assert."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240.0


def run_ranks(folder: Path, world: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function of (rank, world, *arguments) returns in each of `world` processes of one gloo group.

    Args:
        folder: an empty place for their files.
        world: how many.
        task: importable, as its arguments are picklable; gives tensors and plain values.
        arguments: of the function.

    Raises:
        RuntimeError: if a rank fails; its own error is on stderr.
    """
    processes = [_context().Process(target=_rank, args=(rank, world, folder, task, arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    if codes != [0] * world:
        raise RuntimeError(f"exit codes of the ranks: {codes}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")  # torch is loaded once, and ranks start from a clean process
    context.set_forkserver_preload(["torch", "torch.distributed", "trellis_moe.module", "moe.samples", "pytest"])
    return context


def _rank(rank: int, world: int, folder: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        torch.save(task(rank, world, *arguments), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
