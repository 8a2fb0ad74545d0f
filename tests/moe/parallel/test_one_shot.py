"""Holds the all-reduce by direct reads to what it takes, and to its sums where there is a GPU."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from trellis_moe.parallel.collectives import Ranks
from trellis_moe.parallel.one_shot import OneShot, open_one_shot


@pytest.mark.parametrize(
    ("numel", "dtype", "fits"),
    [
        (256, torch.float32, True),
        (257, torch.float32, False),  # beyond the memory
        (512, torch.bfloat16, True),
        (4, torch.bfloat16, False),  # half of what the kernel reads at once
        (256, torch.float16, False),
        (0, torch.float32, False),
    ],
)
def test_it_takes_what_fits(numel: int, dtype: torch.dtype, fits: bool) -> None:
    assert OneShot(torch.zeros(1024, dtype=torch.uint8), "0").takes(numel, dtype) is fits


def test_a_part_lies_at_the_start_of_the_memory() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    part = OneShot(memory, "0").part(2, 8, torch.bfloat16)
    assert (part.shape, part.dtype, part.data_ptr()) == ((2, 8), torch.bfloat16, memory.data_ptr())


class _Nobody:
    group = None


def test_there_is_none_without_bytes_or_on_a_cpu() -> None:
    assert open_one_shot(_Nobody(), 0, torch.device("cuda")) is None  # type: ignore[arg-type]  # is not looked at
    assert open_one_shot(_Nobody(), 64, torch.device("cpu")) is None  # type: ignore[arg-type]  # likewise


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gets_its_own_part_also_in_a_graph(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        found = open_one_shot(Ranks(dist.group.WORLD), 8 * 128 * 4, device)
        if found is None:
            pytest.skip("this device cannot map memory for its peers")
        part = found.part(8, 128, dtype)
        part.copy_(torch.randn(8, 128, device=device))
        out = torch.full_like(part, float("nan"))
        found.all_reduce(part, out)
        assert torch.equal(out, part)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found.all_reduce(part, out)
        part.fill_(2.0)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, part)
    finally:
        dist.destroy_process_group()
