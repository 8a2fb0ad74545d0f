"""Holds the launches of a plan to their counts, their bounds and the reasons for their paths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.samples import LAWS, Layer, make_layer
from trellis_kernels import OPS
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, PrefillPlan, launch_scratch
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    ExecutionPlan,
    RoutingSpec,
    Variant,
    plan_execution,
    plan_weights,
)
from trellis_moe.scratch import BOUNDARY_BYTES
from trellis_moe.variants import OP_BY_OP, plan_variants

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)
SPEC = ActivationSpec(nonlinearity=LAWS[0], io_dtype="float16")


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("2", "3"), intermediate=256)


def variants(layer: Layer, limits: DeviceLimits | None, why: str = "", **capacity: object) -> tuple[Variant, ...]:
    declared = ExecutionCapacity(**{"max_tokens": 4000, "top_k": 2} | capacity)  # type: ignore[arg-type]
    return plan_variants(plan_weights(layer.source), SPEC, RoutingSpec(), declared, limits, why)


def test_each_count_has_a_launch_with_kernels_for_its_count(layer: Layer) -> None:
    found = variants(layer, HOPPER, token_counts=(1, 16))
    assert [(variant.tokens, variant.path) for variant in found] == [
        (1, "moe_small"), (16, "moe_small"), (4000, "prefill"),
    ]  # fmt: skip
    assert found[0].fused != found[1].fused
    assert all(variant.capturable for variant in found)


def test_parts_of_fused_scratch_are_named(layer: Layer) -> None:
    few, many = variants(layer, HOPPER, token_counts=(4,))
    for variant, kind in ((few, MoeSmallKey), (many, PrefillPlan)):
        assert isinstance(variant.fused, kind)
        parts = launch_scratch(variant.fused, variant.tokens)
        assert {buffer.name: buffer.nbytes for buffer in variant.scratch} == parts | {"boundary": BOUNDARY_BYTES}
    assert {"groups", "results"} <= {buffer.name for buffer in few.scratch}
    assert {"rows", "joined"} <= {buffer.name for buffer in many.scratch}


@pytest.mark.parametrize("why", ["", "asked"])
def test_without_kernels_every_op_is_torch(layer: Layer, why: str) -> None:
    for limits in (None, HOPPER) if why else (None,):
        (variant,) = variants(layer, limits, why)
        assert (variant.path, variant.fused) == (OP_BY_OP, None)
        assert variant.backends == tuple((op, "cpu") for op in OPS)
        assert not variant.capturable


def test_counts_that_a_bound_makes_equal_are_one_launch(layer: Layer) -> None:
    (one,) = variants(layer, None, max_tokens=1)
    found = variants(layer, None, token_counts=(1, 8, 64), scratch_bound=one.scratch_nbytes * 8)
    assert [variant.tokens for variant in found] == [1, 8]
    assert all(variant.scratch_nbytes <= one.scratch_nbytes * 8 for variant in found)


def test_a_launch_says_what_its_products_are_made_of(layer: Layer) -> None:
    few, many = variants(layer, HOPPER, token_counts=(4,))
    assert (few.arithmetic, many.arithmetic) == ("exact", "exact")


def test_a_layer_of_very_many_experts_has_a_launch_that_takes_them() -> None:
    many = make_layer(experts=5000, hidden=128, intermediate=128, rates=("1",))
    (variant,) = variants(many, HOPPER, max_tokens=8)
    assert (variant.path, variant.backend("pack_routes"), variant.backend("decode")) == (OP_BY_OP, "cpu", "cute")
    assert [path for path, _ in variant.rejected] == ["moe_small", "prefill"]


@pytest.mark.gpu
def test_limits_of_the_device_choose(layer: Layer) -> None:
    from trellis_kernels.layers import device_limits

    limits = device_limits("cuda")
    assert limits is not None
    assert limits.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert variants(layer, limits, max_tokens=4)[0].path == "moe_small"


@settings(max_examples=60)
@given(
    most=st.integers(1, 3000),
    counts=st.lists(st.integers(1, 3000), max_size=4),
    share=st.integers(1, 40),
    tokens=st.integers(1, 3000),
    limits=st.sampled_from([HOPPER, None]),
)
def test_any_counts_and_bound_give_launches_that_cover_every_run(
    most: int, counts: list[int], share: int, tokens: int, limits: DeviceLimits | None
) -> None:
    source = make_layer(rates=("2",), hidden=128, intermediate=128).source
    plain = {"max_tokens": most, "top_k": 2, "token_counts": [count for count in counts if count <= most]}
    device = "cuda" if limits else "cpu"

    def plan(bound: int | None) -> ExecutionPlan:
        capacity = ExecutionCapacity(**plain, scratch_bound=bound)  # type: ignore[arg-type]
        return plan_execution(plan_weights(source), activation=SPEC, capacity=capacity, device=device, limits=limits)

    free = plan(None)
    assert [variant.tokens for variant in free.variants] == sorted({*plain["token_counts"], most})  # type: ignore[misc]
    bound = max(free.required_nbytes() // share, 1 << 22)
    cut, run = plan(bound), min(tokens, most)
    assert cut.required_nbytes() <= bound
    assert 0 < cut.direct_token_capacity <= most
    at = 0
    for first, count, variant in cut.cut(run):
        assert first == at
        assert 0 < count <= variant.tokens
        at += count
    assert at == run
