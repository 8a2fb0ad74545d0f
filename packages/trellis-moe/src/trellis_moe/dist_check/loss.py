"""Owns what ranks do when one of them dies: run until it does, and say so in time.  It must not start processes."""

from __future__ import annotations

import os
import signal
import time

import torch

from trellis_moe.dist_check.build import Request, bind_share, plan_share, run_into
from trellis_moe.dist_check.ranks import Process
from trellis_moe.dist_check.samples import random_routes
from trellis_moe.errors import MoeDistributedError
from trellis_moe.parallel.collectives import await_device
from trellis_moe.parallel.groups import open_groups
from trellis_moe.parallel.share import tensor_grid
from trellis_moe.specs import IO_DTYPES

__all__ = ["run_until_lost"]

_RUNS_BEFORE = 3


def run_until_lost(process: Process, request: Request, killed: int) -> MoeDistributedError:
    """Run a layer over and over; one rank kills itself after a few runs.

    Args:
        process: this rank.
        request: the layer; its largest token count is run.
        killed: the rank that dies, and does not return.

    Returns:
        What told this rank.

    Raises:
        RuntimeError: if nothing did, for several timeouts.
    """
    grid = tensor_grid(request.source, process.world)
    groups = open_groups(grid)
    bound = bind_share(*plan_share(request, grid, process.rank), groups)
    routes = random_routes(
        request.source,
        max(request.token_counts),
        request.top_k,
        dtype=IO_DTYPES[request.io_dtype],
        device=request.device,
        seed=0,
    )
    out = torch.empty(routes.x.shape, dtype=IO_DTYPES[request.output_dtype], device=request.device)
    runs, deadline = 0, time.monotonic() + 5 * process.timeout
    while time.monotonic() < deadline:
        if process.rank == killed and runs == _RUNS_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            run_into(bound, routes, out)
            await_device(request.device, seconds=process.timeout, what=f"run {runs} of a layer", ranks=groups.world)
        except MoeDistributedError as error:
            return error
        runs += 1
    raise RuntimeError(f"{runs} runs after rank {killed} was to die, nothing told rank {process.rank}")
