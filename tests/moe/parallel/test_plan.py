"""Holds parallel plans to every byte they state, to what crosses, and to what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import trellis_moe.parallel
import trellis_moe.parallel.plan
import trellis_moe.variants
import trellis_prep
from moe.samples import Layer, make_layer
from trellis_format import activations, rate_table, source
from trellis_format.transform import ExpertTransform
from trellis_kernels.layers import DeviceLimits
from trellis_moe import MoeUnsupportedError, MoeValueError, RoutingSpec, specs
from trellis_moe.parallel import ParallelPlan, ReduceSpec, expert_grid, layer_share, plan_parallel, tensor_grid
from trellis_prep import RankGrid

ACTIVATION = specs.ActivationSpec(nonlinearity=activations.Activation("silu"), io_dtype="float16")
CAPACITY = specs.ExecutionCapacity(max_tokens=4, top_k=2)
H200 = DeviceLimits("sm_90a", 132)


def plan_of(
    layer: Layer, grid: RankGrid, rank: int = 0, *, output: str = "bfloat16", tokens: int = 6, **options: Any
) -> ParallelPlan:
    assert layer.source.activation is not None
    return plan_parallel(
        layer_share(layer.source, layer.weights, grid, rank),
        grid,
        rank,
        activation=specs.ActivationSpec(nonlinearity=layer.source.activation, io_dtype="bfloat16", output_dtype=output),
        capacity=specs.ExecutionCapacity(max_tokens=tokens, top_k=3),
        **options,
    )


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(experts=5, hidden=256, intermediate=384)


def named(plan: ParallelPlan) -> dict[str, int]:
    return {buffer.name: buffer.nbytes for buffer in plan.buffers}


def test_buffers_are_those_of_what_crosses(layer: Layer) -> None:
    tensor, row = tensor_grid(layer.source, 2), 6 * 256
    assert named(plan_of(layer, tensor)) == {"partial": 4 * row}
    assert named(plan_of(layer, tensor, reduce=ReduceSpec(dtype="bfloat16"))) == {}
    scatter = ReduceSpec(collective="reduce_scatter")
    assert named(plan_of(layer, tensor, reduce=scatter)) == {"partial": 4 * row, "own_partial": 2 * row}
    assert named(plan_of(layer, tensor, reduce=ReduceSpec(collective="none"))) == {}
    assert named(plan_of(layer, tensor_grid(layer.source, 1))) == {}
    expert = plan_of(layer, expert_grid(layer.source, 2))
    assert named(expert) == {"own_rows": 3 * 3 * 256 * 4, "own_sums": 3 * 256 * 2}
    both = plan_of(layer, expert_grid(layer.source, 2, 2))
    assert named(both) == {"partial": 4 * row, "own_rows": 3 * 3 * 256 * 4, "own_sums": 3 * 256 * 4}


def test_more_than_two_ranks_have_buffers_to_add_in_order(layer: Layer) -> None:
    three, row = tensor_grid(layer.source, 3), 256
    assert named(plan_of(layer, three, tokens=7)) == {
        "partial": 9 * row * 4, "parts": 9 * row * 4, "own_sums32": 3 * row * 4,
        "own_results": 3 * row * 2, "results": 9 * row * 2,
    }  # fmt: skip
    scatter = plan_of(layer, three, tokens=6, reduce=ReduceSpec(collective="reduce_scatter", dtype="bfloat16"))
    assert named(scatter) == {"partial": 6 * row * 2, "parts": 6 * row * 2, "own_sums32": 2 * row * 4}
    assert named(plan_of(layer, three, tokens=7, reduce=ReduceSpec(order="any"))) == {"partial": 7 * row * 4}
    assert plan_of(layer, expert_grid(layer.source, 3)).sums_in_order is False
    assert plan_of(layer, expert_grid(layer.source, 2, 3)).sums_in_order
    assert "are added one rank after the other" in plan_of(layer, three).explain()


def test_copies_write_into_mapped_memory(layer: Layer) -> None:
    two, row, copies = tensor_grid(layer.source, 2), 256, ReduceSpec(transport="copies")
    plan = plan_of(layer, two, tokens=7, reduce=copies, device="cuda", limits=H200)
    assert named(plan) == {"partial": 8 * row * 4, "own_sums32": 4 * row * 4, "own_results": 4 * row * 2}
    assert [(buffer.name, buffer.nbytes) for buffer in plan.mapped_buffers] == [
        ("parts", 8 * row * 4), ("results", 8 * row * 2),
    ]  # fmt: skip
    assert "mapped by all ranks 12288 bytes: parts 8192, results 4096" in plan.explain()
    assert plan_of(layer, two).mapped_buffers == ()
    alone = plan_of(layer, tensor_grid(layer.source, 1), reduce=copies, device="cuda", limits=H200)
    assert (alone.mapped_buffers, alone.buffers) == ((), ())
    with pytest.raises(MoeValueError, match="transport 'copies' needs a CUDA device, got cpu"):
        plan_of(layer, two, reduce=copies)


def test_bytes_are_launches_and_buffers(layer: Layer) -> None:
    plan = plan_of(layer, expert_grid(layer.source, 2))
    assert plan.own_nbytes == 5 * 4
    few = plan_of(layer, expert_grid(layer.source, 2), device="cuda", limits=H200)
    assert few.own_nbytes == 5 * 4 + 6 * 3 * 4
    launches = plan.execution.required_nbytes()
    assert plan.required_nbytes() == -(-launches // 16) * 16 + sum(named(plan).values())


def test_a_plan_evaluates_back_and_differs_by_rank(layer: Layer) -> None:
    names = {
        name: value
        for module in (
            trellis_prep, activations, rate_table, source, specs, trellis_moe, trellis_moe.variants,
            trellis_moe.parallel, trellis_moe.parallel.plan,
        )
        for name, value in vars(module).items()
    }  # fmt: skip
    names |= {name: getattr(trellis_moe, name) for name in trellis_moe.__all__}
    grid = expert_grid(layer.source, 2, 2)
    plans = [plan_of(layer, grid, rank) for rank in range(4)]
    for plan in plans:
        assert eval(repr(plan), names) == plan
        assert plan.declared == plans[0].declared
    assert len(set(map(repr, plans))) == 4


def test_partial_sums_have_the_dtype_in_which_they_cross(layer: Layer) -> None:
    tensor, expert = tensor_grid(layer.source, 2), expert_grid(layer.source, 2)
    assert plan_of(layer, tensor).partial_dtype == "float32"
    assert plan_of(layer, tensor, reduce=ReduceSpec(dtype="bfloat16")).partial_dtype == "bfloat16"
    assert plan_of(layer, tensor, reduce=ReduceSpec(collective="none")).partial_dtype == "bfloat16"
    assert plan_of(layer, expert).partial_dtype == "bfloat16"  # whole sums: no rank adds to them any more
    assert plan_of(layer, expert, reduce=ReduceSpec(experts="partial")).partial_dtype == "float32"


def test_ranks_of_experts_choose_kernels_as_one_rank_does(layer: Layer) -> None:
    options = {"device": "cuda", "limits": H200, "tokens": 20}
    whole = plan_of(layer, tensor_grid(layer.source, 1), **options)
    for rank in range(3):
        mine = plan_of(layer, expert_grid(layer.source, 3), rank, **options)
        assert [v.path for v in mine.execution.variants] == [v.path for v in whole.execution.variants]
        for found, wanted in zip(mine.execution.variants, whole.execution.variants, strict=True):
            assert (found.tokens, found.block_rows) == (wanted.tokens, wanted.block_rows)
            for field in ("up", "down", "row_columns"):
                assert getattr(found.fused, field) == getattr(wanted.fused, field)
        assert len(mine.compile_keys()) == len(mine.execution.compile_keys()) + 1  # the sum of rows


def test_direct_reads_are_bounded_by_what_there_is(layer: Layer) -> None:
    grid = tensor_grid(layer.source, 2)
    assert plan_of(layer, grid).one_shot_nbytes == 0
    assert plan_of(layer, grid, reduce=ReduceSpec(one_shot_bytes=512)).one_shot_nbytes == 512
    assert plan_of(layer, grid, reduce=ReduceSpec(one_shot_bytes=1 << 20)).one_shot_nbytes == 6 * 256 * 4
    expert = plan_of(layer, expert_grid(layer.source, 2), reduce=ReduceSpec(one_shot_bytes=512))
    assert expert.one_shot_nbytes == 0


def test_explain_says_what_crosses(layer: Layer) -> None:
    tensor = plan_of(layer, tensor_grid(layer.source, 2), 1, reduce=ReduceSpec(overlap_tokens=4)).explain()
    assert "rank 1 of 1 expert ranks x 2 tensor ranks: experts 0..5, channels 256..384 of 384" in tensor
    assert "partial sums cross in float32, are added by the process group, results in bfloat16, by all_reduce" in tensor
    assert "pieces of at most 4 tokens" in tensor
    assert "partial 6144" in tensor
    assert "added in slot order, the bits of one rank" in plan_of(layer, expert_grid(layer.source, 2)).explain()
    cheap = plan_of(layer, expert_grid(layer.source, 2), reduce=ReduceSpec(experts="partial")).explain()
    assert "bits depend on who holds what" in cheap
    alone = plan_of(layer, tensor_grid(layer.source, 1))
    assert alone.explain() == alone.execution.explain()


def test_what_is_refused(layer: Layer) -> None:
    with pytest.raises(MoeValueError, match="cannot cross in float16: legal are float32 and the result's bfloat16"):
        plan_of(layer, tensor_grid(layer.source, 2), reduce=ReduceSpec(dtype="float16"))
    atomic = RoutingSpec(deterministic_output=False)
    with pytest.raises(MoeValueError, match="experts='ordered' needs deterministic_output=True"):
        plan_of(layer, expert_grid(layer.source, 2), routing=atomic)
    grid = expert_grid(layer.source, 2)
    share = SimpleNamespace(source=SimpleNamespace(expert_transform=ExpertTransform()))
    with pytest.raises(MoeUnsupportedError, match="experts='partial' does"):
        plan_parallel(share, grid, 0, activation=ACTIVATION, capacity=CAPACITY)  # type: ignore[arg-type]  # part of one
