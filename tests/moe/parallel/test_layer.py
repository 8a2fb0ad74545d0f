"""Holds layers on many ranks to one rank: bits where experts are split, float32 sums where channels are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_set import DEFAULT_DATA
from moe.parallel.ranks import run_ranks
from moe.parallel.tasks import Case, run_cases
from moe.samples import bits, distance
from trellis_moe.parallel import ReduceSpec

TENSOR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative L2 of the sum of shares to the whole, results rounded to the dtype."""
CHECKPOINTS = {name: DEFAULT_DATA / "checkpoints" / name for name in ("tiny_3_mul1", "gptoss_3_mcg")}
IO = "float16"


def sums(**options: object) -> ReduceSpec:
    return ReduceSpec(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 3, 5, 9])
def test_ranks_of_channels_add_up(tmp_path: Path, world: int) -> None:
    cases = [
        Case("float32"),
        Case("io", reduce=sums(dtype=IO)),
        Case("pieces", reduce=sums(overlap_tokens=5)),
        Case("scatter", reduce=sums(collective="reduce_scatter")),
        Case("scatter io", reduce=sums(collective="reduce_scatter", dtype=IO)),
        Case("any order", reduce=sums(order="any", overlap_tokens=5)),
        Case("any order scatter", reduce=sums(order="any", collective="reduce_scatter")),
        Case("none", reduce=sums(collective="none")),
    ]
    tokens = 2 * world
    ranks = run_ranks(tmp_path, world, run_cases, None, tokens, torch.float16, cases)
    whole = ranks[0]["whole"]
    for name in ("float32", "io", "pieces", "any order"):
        assert {bits(found[name]) for found in ranks} == {bits(ranks[0][name])}
        assert distance(ranks[0][name], whole) <= TENSOR[torch.float16]
    for name in ("scatter", "scatter io", "any order scatter"):
        joined = torch.cat([found[name] for found in ranks])
        assert joined.shape == whole.shape
        assert distance(joined, whole) <= TENSOR[torch.float16]
    assert bits(ranks[0]["pieces"]) == bits(ranks[0]["float32"])
    assert distance(torch.stack([found["none"].double() for found in ranks]).sum(0), whole) <= TENSOR[torch.float16]


@pytest.mark.parametrize(("world", "tokens"), [(3, 7), (5, 12)])
def test_a_token_has_the_same_bits_wherever_it_stands(tmp_path: Path, world: int, tokens: int) -> None:
    cases = [Case("forward"), Case("backward", backwards=True), Case("pieces", 1, sums(overlap_tokens=3))]
    for found in run_ranks(tmp_path, world, run_cases, None, tokens, torch.float16, cases):
        assert bits(found["forward"]) == bits(found["backward"]) == bits(found["pieces"])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", TENSOR, ids=str)
def test_ranks_of_experts_give_the_bits_of_one(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    cases = [
        Case("ordered", world),
        Case("by tokens", world, small_rows=0),
        Case("partial", world, sums(experts="partial")),
    ]
    tokens = 3 * world + 1
    ranks = run_ranks(tmp_path, world, run_cases, None, tokens, dtype, cases)
    whole = ranks[0]["whole"]
    for found in ranks:
        assert bits(found["ordered"]) == bits(found["by tokens"]) == bits(whole)
        assert bits(found["partial"]) == bits(ranks[0]["partial"])
        assert distance(found["partial"], whole) <= TENSOR[dtype]


@pytest.mark.parametrize("small_rows", [0, 1 << 20])
def test_ranks_of_experts_scatter_the_bits_of_one(tmp_path: Path, small_rows: int) -> None:
    case = Case("scatter", 3, sums(collective="reduce_scatter"), small_rows)
    ranks = run_ranks(tmp_path, 3, run_cases, None, 9, torch.float16, [case])
    assert bits(torch.cat([found["scatter"] for found in ranks])) == bits(ranks[0]["whole"])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("name", "layer"), [("mixtral_3.3_mul1", 0), ("gptoss_3_mcg", 0), ("dsv3_3_mcg", 1)])
def test_ranks_over_checkpoints(tmp_path: Path, name: str, layer: int, world: int) -> None:
    where = (DEFAULT_DATA / "checkpoints" / name, layer)
    cases = [Case("tensor"), Case("expert", world)]
    ranks = run_ranks(tmp_path, world, run_cases, where, 5, torch.bfloat16, cases)
    whole = ranks[0]["whole"]
    for found in ranks:
        assert bits(found["expert"]) == bits(whole)
        assert bits(found["tensor"]) == bits(ranks[0]["tensor"])
        assert distance(found["tensor"], whole) <= TENSOR[torch.bfloat16]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_grid_over_a_checkpoint(tmp_path: Path, name: str) -> None:
    cases = [
        Case("tensor", 1),
        Case("expert", 4),  # more ranks than experts, where there are fewer
        Case("grid", 2),
        Case("grid by tokens", 2, small_rows=0),
        Case("grid scatter", 2, sums(collective="reduce_scatter")),
        Case("grid partial", 2, sums(experts="partial", dtype=IO)),
    ]
    ranks = run_ranks(tmp_path, 4, run_cases, (CHECKPOINTS[name], 0), 8, torch.float16, cases)
    whole = ranks[0]["whole"]
    for found in ranks:
        assert bits(found["expert"]) == bits(whole)
        assert bits(found["grid"]) == bits(found["grid by tokens"])
        for case in ("tensor", "grid", "grid partial"):
            assert bits(found[case]) == bits(ranks[0][case])
            assert distance(found[case], whole) <= TENSOR[torch.float16]
    assert bits(torch.cat([found["grid scatter"] for found in ranks])) == bits(ranks[0]["grid"])
