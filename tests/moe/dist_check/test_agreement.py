"""Holds the comparison to every way of sharing, and to finding a rank that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe.dist_check.requests import request_of
from moe.parallel.ranks import run_ranks
from trellis_moe.dist_check.agreement import SUM_BOUND, check_agreement, ways_to_share
from trellis_moe.dist_check.ranks import Process
from trellis_moe.parallel.rows import RouteRows


@pytest.mark.parametrize(("world", "grids"), [(2, 0), (3, 0), (4, 2), (6, 2)])
def test_the_ways_are_those_that_the_ranks_allow(world: int, grids: int) -> None:
    ways = ways_to_share(request_of(), world)
    assert all(way.grid.world_size == world for way in ways)
    assert [way.name for way in ways if way.exact] == ["ep", "ep, experts on one rank"]
    assert sum(way.grid.tensor_size > 1 and way.grid.expert_size > 1 for way in ways) == grids
    widths = {tuple(extent.width for extent in way.grid.extents) for way in ways}
    assert any(0 in each for each in widths)


def compare(rank: int, world: int, spoil: bool) -> list[dict[str, Any]]:
    """All comparisons of a rank; one that is spoiled forgets to clear rows of others' experts."""
    if spoil and rank == 1:
        RouteRows.take = lambda self, tokens: self._rows[:tokens].fill_(0.25)  # type: ignore[method-assign]  # a fault
    request = request_of(intermediate=384)
    process = Process(rank, world, request.device, 60.0, captures=False)
    return [found.model_dump() for found in check_agreement(process, request, graphs=False)]


def test_ranks_agree_with_one(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 2, compare, False)
    for rank, found in enumerate(ranks):
        assert {each["rank"] for each in found} == {rank}
        assert {each["mode"] for each in found} == {"eager"}
        assert all(each["ok"] for each in found)
        assert all(each["error"] <= SUM_BOUND for each in found)
        assert all(each["equal"] for each in found if each["way"] in ("ep", "ep, experts on one rank"))
    scattered = [each["tokens"] for each in ranks[0] if each["way"] == "tp scattered"]
    assert scattered == [4]  # one token cannot be shared out


def test_a_rank_that_is_wrong_is_found(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, compare, True)[0]
    wrong = {each["way"] for each in found if not each["ok"]}
    assert "ep" in wrong
    assert not wrong & {"tp", "tp scattered", "ep by partial sums"}


def test_alone_there_is_nothing_to_compare() -> None:
    process = Process(0, 1, torch.device("cpu"), 60.0, captures=False)
    assert list(check_agreement(process, request_of(), graphs=False)) == []
