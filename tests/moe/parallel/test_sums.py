"""Holds sums in the order of ranks to that order, bit for bit, also where tokens do not divide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.parallel.ranks import run_ranks
from moe.samples import bits
from trellis_moe.parallel import Ranks
from trellis_moe.parallel.sums import RankOrder

HIDDEN = 8


def partial_of(rank: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Parts whose sum depends on the order: large ones cancel."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-3, 4, (tokens, HIDDEN), generator=generator)
    return (torch.randn(tokens, HIDDEN, generator=generator) * scale).to(dtype)


def add_in_order(rank: int, world: int, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Both sums of a rank."""
    assert dist.group.WORLD is not None
    own = -(-tokens // world)
    padded = own * world
    buffers = {
        "parts": torch.full((padded, HIDDEN), float("nan"), dtype=dtype),
        "own_sums32": torch.full((own, HIDDEN), float("nan")),
        "own_results": torch.full((own, HIDDEN), float("nan"), dtype=torch.bfloat16),
        "results": torch.full((padded, HIDDEN), float("nan"), dtype=torch.bfloat16),
    }
    order = RankOrder(Ranks(dist.group.WORLD), buffers, torch.bfloat16)
    partial = torch.full((padded, HIDDEN), float("nan"), dtype=dtype)
    partial[:tokens] = partial_of(rank, tokens, dtype)
    whole = torch.full((tokens, HIDDEN), float("nan"), dtype=torch.bfloat16)
    order.add(partial, whole)
    mine = torch.full((own, HIDDEN), float("nan"), dtype=torch.bfloat16)
    order.scatter(partial, mine)
    return {"whole": whole, "mine": mine}


@pytest.mark.parametrize("tokens", [6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_are_added_one_after_the_other(tmp_path: Path, tokens: int, dtype: torch.dtype) -> None:
    parts = [partial_of(rank, tokens, dtype).float() for rank in range(3)]
    wanted = ((parts[0] + parts[1]) + parts[2]).bfloat16()
    if dtype == torch.float32:
        assert bits((parts[0] + parts[2]) + parts[1]) != bits((parts[0] + parts[1]) + parts[2])
    found = run_ranks(tmp_path, 3, add_in_order, tokens, dtype)
    assert {bits(each["whole"]) for each in found} == {bits(wanted)}
    assert bits(torch.cat([each["mine"] for each in found])[:tokens]) == bits(wanted)
