"""Holds the formulas of scratch to the published sizes, and plans to staying below them."""

from __future__ import annotations

import pytest

from trellis_format.activations import Activation
from trellis_kernels.bench.layers import random_source
from trellis_kernels.layers import DeviceLimits
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    ExecutionPlan,
    MoeGeometry,
    plan_execution,
    plan_weights,
)
from trellis_moe.workspace import Workload, packed_workspace, rotated_workspace, route_blocks

PACKED = Workload(
    geometry=MoeGeometry(num_experts=896, hidden_size=7168, intermediate_size=192),
    tokens=4096,
    top_k=16,
    multiprocessors=188,
)
"""The workload whose sizes were published."""


def rotated(tokens: int) -> Workload:
    """Kimi-K3 split over nine, whose experts take the latent width."""
    geometry = MoeGeometry(num_experts=896, hidden_size=3584, intermediate_size=384)
    return Workload(geometry=geometry, tokens=tokens, top_k=16, multiprocessors=188)


def test_the_published_sizes_come_out_item_by_item() -> None:
    whole, fused = packed_workspace(PACKED, fused_sum=False), packed_workspace(PACKED, fused_sum=True)
    assert route_blocks(PACKED) == 64
    shared = {
        "second_rows": 25_165_824, "first_sums": 49_283_072, "second_sums": 49_283_072, "packed_routes": 487_936,
        "block_experts": 35_904, "packed_count": 16, "expert_offsets": 3_600, "expert_counts": 3_584,
    }  # fmt: skip
    assert {name: whole[name] for name in shared} == shared == {name: fused[name] for name in shared}
    assert (whole["first_rows"], fused["first_rows"], fused["sum"]) == (939_524_096, 58_720_256, 117_440_512)
    route = ("logits", "topk_logits", "topk_ids", "topk_weights")
    assert sum(whole[name] for name in route) == 8_126_464
    assert sum(whole.values()) == 1_071_913_568
    assert sum(fused.values()) == 308_550_240


@pytest.mark.parametrize(("tokens", "nbytes"), [(4096, 1_147_647_928), (8, 20_675_048)])
def test_the_rotated_design_takes_what_it_is_known_to(tokens: int, nbytes: int) -> None:
    assert sum(rotated_workspace(rotated(tokens), joint_inputs=True).values()) == nbytes
    apart = rotated_workspace(rotated(tokens), joint_inputs=False)
    assert sum(apart.values()) == nbytes + 2 * tokens * 16 * 3584


@pytest.mark.parametrize(
    ("tokens", "experts", "rows"),
    [(402, 896, 8), (403, 896, 8), (404, 896, 16), (806, 896, 16), (1612, 896, 32), (2419, 896, 48), (2420, 896, 64)],
)
def test_route_blocks_change_where_they_are_nine_tenths_full(tokens: int, experts: int, rows: int) -> None:
    geometry = MoeGeometry(num_experts=experts, hidden_size=3584, intermediate_size=384)
    assert route_blocks(Workload(geometry=geometry, tokens=tokens, top_k=16, multiprocessors=188)) == rows


def test_experts_without_a_gate_have_half_the_first_channels() -> None:
    gateless = Workload(geometry=PACKED.geometry, tokens=8, top_k=2, multiprocessors=132, gated=False)
    assert (gateless.routes, gateless.first_channels) == (16, 192)


def planned(*, tokens: int, shared: bool, bound: int | None) -> ExecutionPlan:
    """A plan of the rotated workload on a Hopper GPU."""
    source = random_source(
        experts=896,
        hidden=3584,
        intermediate=384,
        codebook="mcg",
        rates=["2"],
        activation=Activation("situ"),
        shared=shared,
        joint=True,
    )
    return plan_execution(
        plan_weights(source),
        activation=ActivationSpec(nonlinearity=Activation("situ"), io_dtype="bfloat16", output_dtype="bfloat16"),
        capacity=ExecutionCapacity(max_tokens=tokens, top_k=16, scratch_bound=bound),
        device="cuda",
        limits=DeviceLimits(arch="sm_90a", multiprocessors=132),
    )


@pytest.mark.parametrize("shared", [True, False])
def test_a_plan_takes_less_than_either_design(shared: bool) -> None:
    free = planned(tokens=4096, shared=shared, bound=None).required_nbytes()
    assert free < sum(rotated_workspace(rotated(4096), joint_inputs=True).values())
    for bound in (308_550_239, 128 << 20, 32 << 20):
        plan = planned(tokens=4096, shared=shared, bound=bound)
        assert plan.required_nbytes() <= bound
        assert plan.direct_token_capacity == 4096


def test_a_launch_of_few_tokens_takes_less_too() -> None:
    plan = planned(tokens=8, shared=True, bound=None)
    assert plan.variants[0].path == "moe_small"
    assert plan.required_nbytes() < sum(rotated_workspace(rotated(8), joint_inputs=True).values()) // 4


@pytest.mark.parametrize(
    ("tokens", "bound", "nbytes"), [(8, None, 3_198_704), (4096, 256 << 20, 267_169_776), (4096, None, 1_059_015_664)]
)
def test_the_bytes_of_the_rotated_workload_are_stated(tokens: int, bound: int | None, nbytes: int) -> None:
    """What this package takes for it; another number is a change that callers see."""
    assert planned(tokens=tokens, shared=True, bound=bound).required_nbytes() == nbytes
