"""Holds exchanges through mapped memory to their sums; threads stand for ranks, their barrier for the device's."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.samples import bits
from trellis_moe import MoeDistributedError
from trellis_moe.parallel.collectives import Ranks
from trellis_moe.parallel.mapped import MappedRanks, map_memory
from trellis_moe.parallel.sums import RankOrder

HIDDEN, NBYTES = 8, 1 << 12


class Peers:
    """Memory of all ranks, as the handle of one of them gives it."""

    def __init__(self, memories: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._memories, self._barrier = memories, barrier

    def barrier(self, channel: int) -> None:
        assert channel == 0
        self._barrier.wait(30)

    def get_buffer(self, rank: int, sizes: list[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        count = sizes[0] * sizes[1]
        return self._memories[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)


def run_threads(size: int, task: Any) -> list[Any]:
    """What a function of a rank's `MappedRanks` gives in each of several threads."""
    memories, barrier = [torch.full((NBYTES,), 0xFF, dtype=torch.uint8) for _ in range(size)], threading.Barrier(size)
    everyone = [MappedRanks(size, rank, memories[rank], Peers(memories, barrier)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(task, everyone))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tokens", [6, 7])
def test_parts_are_added_in_the_order_of_ranks(size: int, tokens: int) -> None:
    own = -(-tokens // size)
    padded = own * size
    parts = [
        torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(rank)) * 100**rank for rank in range(3)
    ]
    wanted = parts[0] + parts[1]
    wanted = wanted if size == 2 else wanted + parts[2]

    def add(ranks: MappedRanks) -> list[torch.Tensor]:
        first = padded * HIDDEN * 4
        results = ranks.memory[first : first + padded * HIDDEN * 2].view(torch.bfloat16).view(padded, HIDDEN)
        buffers = {
            "parts": ranks.memory[:first].view(torch.float32).view(padded, HIDDEN),
            "results": results,
            "own_sums32": torch.full((own, HIDDEN), float("nan")),
            "own_results": torch.full((own, HIDDEN), float("nan"), dtype=torch.bfloat16),
        }
        assert all(ranks.holds(buffers[name]) for name in ("parts", "results"))
        assert not ranks.holds(buffers["own_sums32"])
        order = RankOrder(ranks, buffers, torch.bfloat16)
        partial = torch.full((padded, HIDDEN), float("nan"))
        outs = []
        for turn in (1.0, 2.0):  # twice, so that memory is used again
            partial[:tokens] = parts[ranks.rank] * turn
            out = torch.full((tokens, HIDDEN), float("nan"), dtype=torch.bfloat16)
            order.add(partial, out)
            outs.append(out)
        return outs

    for once, twice in run_threads(size, add):
        assert bits(once) == bits(wanted.bfloat16())
        assert bits(twice) == bits((wanted * 2).bfloat16())


def test_every_rank_gets_its_part_of_every_other() -> None:
    def exchange(ranks: MappedRanks) -> torch.Tensor:
        out = ranks.memory[: 6 * 2 * 4].view(torch.float32).view(6, 2)
        mine = torch.arange(12.0).view(6, 2) + 100 * ranks.rank
        ranks.exchange(out, mine)
        return out.clone()

    for rank, found in enumerate(run_threads(3, exchange)):
        wanted = torch.cat([torch.arange(12.0).view(6, 2)[2 * rank : 2 * rank + 2] + 100 * other for other in range(3)])
        assert torch.equal(found, wanted)


def test_a_rank_that_cannot_map_is_told_what_to_ask_for(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        with pytest.raises(MoeDistributedError, match=r"rank 0 of 1: .* transport='group' does without"):
            map_memory(Ranks(dist.group.WORLD), 64, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_one_rank_exchanges_with_itself_also_in_a_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        ranks = map_memory(Ranks(dist.group.WORLD), NBYTES, device)
        out = ranks.memory[:256].view(torch.float32).view(8, HIDDEN)
        mine = torch.randn(8, HIDDEN, device=device)
        ranks.exchange(out, mine)
        assert torch.equal(out, mine)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ranks.exchange(out, mine)
        mine.fill_(3.0)
        graph.replay()
        assert torch.equal(out, mine)
    finally:
        dist.destroy_process_group()
