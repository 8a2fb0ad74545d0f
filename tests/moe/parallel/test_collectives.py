"""Holds collectives to their sums, and to saying which rank failed at what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.parallel.ranks import run_ranks
from trellis_moe import MoeDistributedError
from trellis_moe.parallel import Ranks, await_device


def every_collective(rank: int, world: int) -> dict[str, Any]:
    """All of them once, over values that tell ranks and places apart."""
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD)
    mine = torch.arange(2.0 * world) + 100 * rank
    summed = mine.clone()
    ranks.all_reduce(summed).wait()
    part = torch.full((2,), float("nan"))
    ranks.reduce_scatter(part, mine.clone())
    joined = torch.full((2 * world,), float("nan"))
    ranks.all_gather(joined, part)
    swapped = torch.full((2 * world,), float("nan"))
    ranks.exchange(swapped, mine)
    return {"swapped": swapped, "sum": summed, "part": part, "joined": joined, "place": (ranks.rank, ranks.size)}


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_those_of_all_ranks(tmp_path: Path, world: int) -> None:
    wanted = sum(torch.arange(2.0 * world) + 100 * rank for rank in range(world))
    for rank, found in enumerate(run_ranks(tmp_path, world, every_collective)):
        assert found["place"] == (rank, world)
        assert torch.equal(found["sum"], wanted)
        assert torch.equal(found["part"], wanted[2 * rank : 2 * rank + 2])
        assert torch.equal(found["joined"], wanted)
        own = [2.0 * rank + place + 100 * other for other in range(world) for place in range(2)]
        assert torch.equal(found["swapped"], torch.tensor(own))


def after_the_other_left(rank: int, world: int) -> str:
    """What the first rank is told when the second one is gone."""
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD)
    ranks.all_reduce(torch.ones(1)).wait()
    if rank == 1:
        return ""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ranks.all_reduce(torch.ones(3)).wait()
        except MoeDistributedError as error:
            return str(error)
    return "nothing"


def test_a_lost_rank_is_named_with_what_was_under_way(tmp_path: Path) -> None:
    said = run_ranks(tmp_path, 2, after_the_other_left)[0]
    assert said.startswith("rank 0 of 2: all-reduce of [3] torch.float32 failed: ")


def test_a_device_without_a_queue_is_not_waited_for() -> None:
    await_device(torch.device("cpu"), seconds=0.0, what="nothing")


@pytest.mark.gpu
def test_work_that_does_not_end_in_time_is_told() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    await_device(device, seconds=10.0, what="nothing")
    torch.cuda._sleep(4_000_000_000)  # about two seconds of cycles
    with pytest.raises(MoeDistributedError, match=r"this process: a sleep did not end within 0\.05 s"):
        await_device(device, seconds=0.05, what="a sleep")
    torch.cuda.synchronize()
