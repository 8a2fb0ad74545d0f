"""Holds the words of a plan to its numbers."""

from __future__ import annotations

from moe.samples import make_layer, make_plan
from trellis_kernels.layers import DeviceLimits
from trellis_moe import ExecutionCapacity, RoutingSpec, plan_execution, plan_weights
from trellis_moe.explain import explain

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


def test_every_launch_has_its_lines() -> None:
    layer = make_layer(rates=("3",))
    capacity = ExecutionCapacity(max_tokens=500, top_k=2, token_counts=(1,), scratch_bound=1 << 26, route_experts=8)
    spec = make_plan(layer).activation
    plan = plan_execution(plan_weights(layer.source), activation=spec, capacity=capacity, device="cuda", limits=HOPPER)
    text = explain(plan)
    assert text == plan.explain()
    lines = text.splitlines()
    for variant in plan.variants:
        (first,) = [index for index, line in enumerate(lines) if f"launch of up to {variant.tokens} tokens" in line]
        assert variant.path in lines[first]
        assert f"{variant.scratch_nbytes} bytes" in lines[first + 1]
        assert all(f"{buffer.name} {buffer.nbytes}" in lines[first + 1] for buffer in variant.scratch)
        assert lines[first + 2].strip().startswith("kernels: ")
    assert f"at most {1 << 26} bytes" in text
    assert "ids of 8 experts through a map" in text
    assert "  not moe_small: " in text


def test_a_launch_that_no_graph_can_hold_says_so() -> None:
    layer = make_layer(rates=("3",))
    plan = plan_execution(
        plan_weights(layer.source),
        activation=make_plan(layer).activation,
        routing=RoutingSpec(apply_router_weight_on_input=True),
        capacity=ExecutionCapacity(max_tokens=9, top_k=3),
        device="cuda",
        limits=HOPPER,
    )
    assert "not for CUDA graphs" in plan.explain()
    assert "it multiplies route weights into what experts give" in plan.explain()
