"""Holds the exchange of rows to the launches that a plan is cut into, whoever adds the sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.parallel.ranks import run_ranks
from moe.parallel.tasks import Case, run_case
from moe.samples import bits, make_layer, make_plan, make_routes
from trellis_moe import plan_execution
from trellis_moe.parallel import open_groups, tensor_grid
from trellis_moe.specs import ExecutionCapacity

TOKENS = 7


def cut_into_launches(rank: int, world: int, bound: int) -> dict[str, torch.Tensor]:
    """Ordered sums over experts, of launches that are cut by a bound of scratch and of one launch."""
    layer = make_layer(experts=4, hidden=128, intermediate=128)
    routes = make_routes(layer, TOKENS, 2)
    capacity = ExecutionCapacity(max_tokens=TOKENS, top_k=2, scratch_bound=bound)
    return {
        str(small): run_case(rank, world, layer, routes, Case("cut", world, small_rows=small), capacity)
        for small in (0, 1 << 20)
    } | {"whole": run_case(0, 1, layer, routes, Case("whole"))}


@pytest.mark.parametrize(("bound", "launches"), [(20_000, 2), (1 << 20, 1)])
def test_launches_that_are_cut_give_the_same_bits(tmp_path: Path, bound: int, launches: int) -> None:
    layer = make_layer(experts=4, hidden=128, intermediate=128)
    plan = make_plan(layer, tokens=TOKENS, top_k=2)
    weights, capacity = plan.weights, replace(plan.capacity, scratch_bound=bound)
    assert len(plan_execution(weights, activation=plan.activation, capacity=capacity).cut(TOKENS)) == launches
    for found in run_ranks(tmp_path, 2, cut_into_launches, bound):
        assert bits(found["0"]) == bits(found[str(1 << 20)]) == bits(found["whole"])


def disagree(rank: int, world: int) -> list[str]:
    """What is said when ranks declare different things."""
    ranks = open_groups(tensor_grid(make_layer().source, world)).world
    said = []
    for value in (rank, replace(ExecutionCapacity(max_tokens=8, top_k=2), max_tokens=8 + rank)):
        try:
            ranks.check_same("the capacity", value)
        except ValueError as error:
            said.append(str(error))
    ranks.check_same("the world", world)
    dist.barrier()
    return said


def test_ranks_that_declare_different_things_are_told(tmp_path: Path) -> None:
    found: list[Any] = run_ranks(tmp_path, 2, disagree)
    assert found[0] == found[1]
    assert found[0][0] == "the capacity: rank 0 has 0, rank 1 has 1; all ranks need the same"
    assert "max_tokens=8, " in found[0][1]
    assert "max_tokens=9, " in found[0][1]
