"""Holds plans to what they promise: bytes, words, refusals before anything moves, and reprs that evaluate back."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from moe.samples import LAWS, Layer, make_binding, make_layer, make_plan
from trellis_format.activations import Activation
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.rate_table import RateTable
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource
from trellis_kernels import BLOCK_ROWS, OPS
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, PrefillPlan, Tiling, scratch_nbytes
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    ExecutionPlan,
    MoeTypeError,
    MoeUnsupportedError,
    MoeValueError,
    RoutingSpec,
    ScratchBuffer,
    Variant,
    WeightPlan,
    plan_execution,
    plan_weights,
    prepare_weights,
)
from trellis_prep import PrepValueError, even_extents

NAMES = (
    *(Activation, ActivationSpec, CodeLayout, ExecutionCapacity, ExecutionPlan, ExpertGeometry, Projection, RateTable),
    *(DeviceLimits, MoeSmallKey, PrefillPlan, RoutingSpec, ScratchBuffer, Tiling, TrellisExtent, TrellisSource),
    *(Variant, WeightPlan),
)
"""What a repr of a plan is made of."""


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("1", "2.5", "4", "8"), biased=True, hidden=200, intermediate=320, up_divisor=128.0)


def declarations(**changes: Any) -> dict[str, Any]:
    spec = ActivationSpec(nonlinearity=LAWS[0], io_dtype="float16")
    return {"activation": spec, "capacity": ExecutionCapacity(max_tokens=9, top_k=3)} | changes


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_repr_evaluates_back(law: Activation) -> None:
    layer = make_layer(activation=law, rates=("2", "3.5"), biased=law.gated, shared=True, intermediate=384)
    plan = make_plan(layer, extent=even_extents(384, 3)[1], output_dtype="bfloat16")
    again = eval(repr(plan), {kind.__name__: kind for kind in NAMES})
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.explain() == plan.explain()


def test_a_plan_differs_where_a_declaration_does(layer: Layer) -> None:
    plans = [
        make_plan(layer),
        make_plan(layer, tokens=10),
        make_plan(layer, top_k=4),
        make_plan(layer, dtype=torch.bfloat16),
        make_plan(layer, output_dtype="float16"),
        make_plan(layer, extent=even_extents(384, 2)[0]),
        make_plan(layer, device="cuda"),
        make_plan(make_layer(rates=("4",))),
    ]
    assert len(set(plans)) == len(plans)


def test_nothing_of_a_plan_can_be_changed(layer: Layer) -> None:
    plan = make_plan(layer)
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, getattr(plan, field.name))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weight_plans_state_the_bytes_that_are_prepared(layer: Layer, world_size: int) -> None:
    stated = 0
    for extent in even_extents(384, world_size):
        plan = plan_weights(layer.source, extent)
        experts = prepare_weights(plan, layer.weights)
        assert plan.required_nbytes() == experts.nbytes
        stated += experts.layout.code_bytes
    assert stated == layer.source.code_bytes()


def test_execution_plans_state_the_bytes_that_are_carved(layer: Layer) -> None:
    plan = make_plan(layer, tokens=11, top_k=2)
    make_binding(layer, plan)  # an arena of exactly the stated bytes serves
    assert plan.required_nbytes() == sum(-(-buffer.nbytes // 16) * 16 for buffer in plan.variants[0].scratch)


def test_explain_says_what_will_run(layer: Layer) -> None:
    plan = make_plan(layer, tokens=11, top_k=2, dtype=torch.bfloat16, extent=even_extents(384, 3)[1])
    text = plan.explain()
    for words in (
        "5 experts", "codebook mul1", "K = 1, 2.5, 4, 8", "hidden 200 channels, stored 256",
        "intermediate 320 channels, stored 384", "channels 128..256 of 384", "11 tokens x 2 routes",
        f"blocks of {plan.variants[0].block_rows} rows", "launch of up to 11 tokens: op_by_op",
        "not moe_small: the device is a CPU", "not prefill: the device is a CPU", "arithmetic: exact",
        "activation silu", "bfloat16 in", "float16 operands", "float32 out",
        "deterministic", f"prepared {plan.weights.required_nbytes()} bytes", f"scratch {plan.required_nbytes()} bytes",
        *(f"{op} on cpu" for op in OPS), *(f"{buffer.name} {buffer.nbytes}" for buffer in plan.variants[0].scratch),
    ):  # fmt: skip
        assert words in text, words


def test_each_op_has_a_planned_backend(layer: Layer) -> None:
    (variant,) = make_plan(layer).variants
    assert [op for op, _ in variant.backends] == list(OPS)
    assert {variant.backend(op) for op in OPS} == {"cpu"}
    assert not variant.capturable
    assert make_plan(layer, device="cuda:3").device_type == "cuda"


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "rows"),
    [(1, 1, 5, 8), (5, 7, 5, 8), (36, 1, 5, 16), (64, 5, 5, 64), (43, 1, 1, 48), (4096, 8, 5, 64)],
)
def test_blocks_hold_an_average_expert_up_to_nine_tenths(tokens: int, top_k: int, experts: int, rows: int) -> None:
    layer = make_layer(experts=experts, hidden=128, intermediate=128, rates=("1",))
    average = tokens * top_k / experts
    fitting = [size for size in BLOCK_ROWS if size <= 64 and average < 0.9 * size]
    (variant,) = make_plan(layer, tokens=tokens, top_k=top_k).variants
    assert variant.block_rows == (fitting[0] if fitting else 64) == rows


@pytest.mark.parametrize(
    ("law", "experts_law", "words"),
    [(LAWS[5], LAWS[0], "relu2 takes no gate, the experts have a gate"),
     (LAWS[0], LAWS[5], "silu takes a gate, the experts have no gate")],
)  # fmt: skip
def test_a_law_must_fit_the_experts(law: Activation, experts_law: Activation, words: str) -> None:
    layer = make_layer(activation=experts_law, hidden=128, intermediate=128, rates=("1",))
    spec = ActivationSpec(nonlinearity=law, io_dtype="float16")
    with pytest.raises(MoeValueError, match=words):
        plan_execution(plan_weights(layer.source), **declarations(activation=spec))


@pytest.mark.parametrize("device", ["meta", "tpu", "", 3.5, "cuda:x"])
def test_devices_are_cpu_or_cuda(layer: Layer, device: Any) -> None:
    with pytest.raises(MoeValueError, match=f"must be cpu or cuda, got '?{device}"):
        plan_execution(plan_weights(layer.source), **declarations(), device=device)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "silu"}, "activation must be an ActivationSpec, got str"),
        ({"capacity": 4}, "capacity must be an ExecutionCapacity, got int"),
        ({"routing": True}, "routing must be a RoutingSpec, got bool"),
    ],
)
def test_declarations_have_their_types(layer: Layer, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MoeTypeError, match=words):
        plan_execution(plan_weights(layer.source), **declarations(**changes))


def test_weights_have_their_types(layer: Layer) -> None:
    with pytest.raises(MoeTypeError, match="weights must be a WeightPlan, got TrellisSource"):
        plan_execution(layer.source, **declarations())
    with pytest.raises(MoeTypeError, match="source must be a TrellisSource, got Layer"):
        plan_weights(layer)
    with pytest.raises(MoeTypeError, match="extent must be a TrellisExtent, got slice"):
        plan_weights(layer.source, slice(0, 128))


@pytest.mark.parametrize(
    ("size", "first", "count", "kind", "words"),
    [
        (512, 0, 4, PrepValueError, "axis of 512 channels, the weights of one of 384"),
        (384, 1, 4, FormatValueError, "32..160 cuts a Hadamard block of 128; nearest legal extent: 0..256"),
    ],
)
def test_shares_are_whole_blocks_of_the_axis(
    layer: Layer, size: int, first: int, count: int, kind: type[Exception], words: str
) -> None:
    extent = TrellisExtent(global_intermediate_size=size, first_slot=first, slot_count=count)
    with pytest.raises(kind, match=words):
        plan_weights(layer.source, extent)


def test_an_empty_share_is_planned_as_such(layer: Layer) -> None:
    extent = TrellisExtent(global_intermediate_size=384, first_slot=4, slot_count=0)
    plan = make_plan(layer, extent=extent)
    assert plan.weights.extent.width == 0
    assert "channels 128..128 of 384" in plan.explain()
    assert {buffer.name for buffer in plan.variants[0].scratch if not buffer.nbytes} == {
        "gate",
        "up",
        "rotated_activation",
    }


HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


def test_fused_on_a_gpu_take_the_fused_path(layer: Layer) -> None:
    plan = plan_execution(plan_weights(layer.source), **declarations(), device="cuda", limits=HOPPER)
    (variant,) = plan.variants
    key = variant.fused
    assert isinstance(key, MoeSmallKey)
    assert variant.backends == (("moe_small", "cute"),)
    assert variant.capturable
    assert (key.hidden, key.padded_hidden, key.width) == (200, 256, 384)
    assert (key.up_rates, key.down_rates) != ((), ())
    assert {*key.up_rates, *key.down_rates} == {2, 5, 8, 16}
    assert (key.x_dtype, key.out_dtype, key.weight_dtype, key.id_bytes) == ("float16", "float32", "float32", 8)
    assert plan.required_nbytes() >= scratch_nbytes(key, 9) + 112
    assert "moe_small on cute" in plan.explain()
    again = eval(repr(plan), {kind.__name__: kind for kind in NAMES})
    assert again == plan


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_public_names_are_all_that_a_repr_needs(layer: Layer, device: str) -> None:
    capacity = ExecutionCapacity(max_tokens=5000, top_k=3, token_counts=(1, 8))
    limits = HOPPER if device == "cuda" else None
    plan = plan_execution(plan_weights(layer.source), **declarations(capacity=capacity), device=device, limits=limits)
    names: dict[str, Any] = {}
    for package in ("trellis_format", "trellis_kernels.layers", "trellis_moe"):
        exec(f"from {package} import *", names)
    assert eval(repr(plan), names) == plan


def test_dtypes_of_routes_reach_the_key(layer: Layer) -> None:
    routing = RoutingSpec(id_dtype="int32", weight_dtype="bfloat16")
    plan = plan_execution(plan_weights(layer.source), **declarations(routing=routing), device="cuda", limits=HOPPER)
    key = plan.variants[0].fused
    assert isinstance(key, MoeSmallKey)
    assert (key.id_bytes, key.weight_dtype) == (4, "bfloat16")


@pytest.mark.parametrize(
    ("tokens", "kind"), [(1, MoeSmallKey), (26, MoeSmallKey), (27, PrefillPlan), (5000, PrefillPlan)]
)
def test_many_routes_of_an_expert_take_the_path_of_many_tokens(layer: Layer, tokens: int, kind: type) -> None:
    assert layer.source.geometry.num_experts == 5
    capacity = ExecutionCapacity(max_tokens=tokens, top_k=3)
    plan = plan_execution(plan_weights(layer.source), **declarations(capacity=capacity), device="cuda", limits=HOPPER)
    assert type(plan.variants[0].fused) is kind
    assert [backend for _, backend in plan.variants[0].backends] == ["cute"]
    assert eval(repr(plan), {kind.__name__: kind for kind in NAMES}) == plan


def test_a_bound_cuts_the_scratch_of_many_tokens(layer: Layer) -> None:
    def needed(bound: int | None) -> int:
        capacity = ExecutionCapacity(max_tokens=5000, top_k=3, scratch_bound=bound)
        plan = plan_execution(
            plan_weights(layer.source), **declarations(capacity=capacity), device="cuda", limits=HOPPER
        )
        assert isinstance(plan.variants[0].fused, PrefillPlan)
        return plan.required_nbytes()

    free = needed(None)
    bound = free // 2
    assert needed(bound) <= bound < free
    with pytest.raises(MoeValueError, match="scratch_bound"):
        ExecutionCapacity(max_tokens=1, top_k=1, scratch_bound=0)


def test_another_architecture_runs_many_tokens_with_its_own_engine(layer: Layer) -> None:
    capacity = ExecutionCapacity(max_tokens=5000, top_k=3)
    ampere = DeviceLimits(arch="sm_80", multiprocessors=108)
    plan = plan_execution(plan_weights(layer.source), **declarations(capacity=capacity), device="cuda", limits=ampere)
    fused = plan.variants[0].fused
    assert isinstance(fused, PrefillPlan)
    assert fused.engine == "mma"


def test_a_gpu_that_is_not_known_runs_op_by_op(layer: Layer) -> None:
    assert make_plan(layer).variants[0].fused is None
    if not torch.cuda.is_available():
        assert make_plan(layer, device="cuda").variants[0].fused is None


COUNTS = (1, 5, 8, 26, 64)


def counted(layer: Layer, *, limits: DeviceLimits | None = HOPPER, **changes: Any) -> ExecutionPlan:
    """A plan with launches of their own for `COUNTS`, up to 5,000 tokens."""
    capacity = ExecutionCapacity(**{"max_tokens": 5000, "top_k": 3, "token_counts": COUNTS} | changes)
    device = "cuda" if limits else "cpu"
    return plan_execution(plan_weights(layer.source), **declarations(capacity=capacity), device=device, limits=limits)


@pytest.mark.parametrize("limits", [HOPPER, None], ids=["hopper", "cpu"])
def test_an_exact_count_has_its_launch_and_others_the_next_larger(layer: Layer, limits: DeviceLimits | None) -> None:
    plan = counted(layer, limits=limits)
    assert [variant.tokens for variant in plan.variants] == [*COUNTS, 5000]
    for tokens in (*range(1, 70), 4999, 5000):
        expected = min(count for count in (*COUNTS, 5000) if count >= tokens)
        assert plan.variant_for(tokens).tokens == expected
        assert plan.cut(tokens) == ((0, tokens, plan.variant_for(tokens)),)
    for refuse in (plan.variant_for, plan.cut):
        with pytest.raises(MoeValueError, match="5001 tokens exceed the plan's 5000"):
            refuse(5001)


def test_each_launch_has_the_path_of_its_count(layer: Layer) -> None:
    plan = counted(layer)
    assert [variant.path for variant in plan.variants] == ["moe_small"] * 4 + ["prefill"] * 2
    assert len(set(plan.variants)) == len(plan.variants)
    assert eval(repr(plan), {kind.__name__: kind for kind in NAMES}) == plan
    text = plan.explain()
    assert all(f"launch of up to {variant.tokens} tokens: {variant.path}" in text for variant in plan.variants)
    assert "may depend on which launch takes it" in text
    assert "may depend on which launch takes it" not in make_plan(layer).explain()


def test_launches_share_one_arena(layer: Layer) -> None:
    plan = counted(layer)
    assert plan.required_nbytes() == max(variant.scratch_nbytes for variant in plan.variants)
    for spec in plan.scratch_specs():
        assert spec.first % 16 == 0
        assert spec.first + spec.buffer.nbytes <= plan.required_nbytes()
    for variant in plan.variants:
        mine = [spec for spec in plan.scratch_specs() if spec.launch_tokens == variant.tokens]
        assert tuple(spec.buffer for spec in mine) == variant.scratch
        assert all(one.first + one.buffer.nbytes <= two.first for one, two in itertools.pairwise(mine))


@pytest.mark.parametrize("limits", [HOPPER, DeviceLimits("sm_80", 108), None], ids=["hopper", "ampere", "cpu"])
@pytest.mark.parametrize("share", [2, 3, 40, 900])
def test_runs_above_the_largest_launch_are_cut_by_the_plan(
    layer: Layer, limits: DeviceLimits | None, share: int
) -> None:
    free = counted(layer, limits=limits, token_counts=())
    plan = counted(layer, limits=limits, token_counts=(1, 8), scratch_bound=free.required_nbytes() // share)
    assert plan.required_nbytes() <= free.required_nbytes() // share
    direct = plan.direct_token_capacity
    assert 0 < direct == plan.variants[-1].tokens <= plan.capacity.max_tokens
    for tokens in (1, 2, 8, 9, direct, direct + 1, 4999, 5000):
        if tokens > 5000:
            continue
        launches = plan.cut(tokens)
        assert [first for first, _, _ in launches] == list(range(0, tokens, direct))
        assert sum(count for _, count, _ in launches) == tokens
        assert all(0 < count <= variant.tokens for _, count, variant in launches)
    if direct < 5000:
        assert f"more than {direct} tokens are cut" in plan.explain()


def test_a_bound_below_one_token_is_refused_with_both_numbers(layer: Layer) -> None:
    needed = counted(layer, limits=None, max_tokens=1, token_counts=()).required_nbytes()
    words = f"bound of {needed - 1} bytes is below the {needed} that one token"
    with pytest.raises(MoeValueError, match=words):
        counted(layer, limits=None, scratch_bound=needed - 1)
    assert counted(layer, limits=None, scratch_bound=needed).direct_token_capacity == 1


def test_the_reference_backend_can_be_asked_for(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_execution(plan_weights(layer.source), **declarations(), device="cuda", limits=HOPPER, reference=True)
    (variant,) = plan.variants
    assert plan.reference
    assert (variant.path, {backend for _, backend in variant.backends}) == ("op_by_op", {"cpu"})
    assert "not moe_small: the reference backend is asked for" in plan.explain()
    assert plan.compile_keys() == ()
    monkeypatch.setattr("trellis_moe.plan.reference_asked", lambda: True)
    assert plan_execution(plan_weights(layer.source), **declarations(), device="cuda", limits=HOPPER) == plan


def arriving(layer: Layer, limits: DeviceLimits | None, tokens: int, dtype: str = "bfloat16") -> ExecutionPlan:
    """A plan that may add routes in the order of arrival."""
    return plan_execution(
        plan_weights(layer.source),
        activation=ActivationSpec(nonlinearity=LAWS[0], io_dtype="bfloat16", output_dtype=dtype),
        capacity=ExecutionCapacity(max_tokens=tokens, top_k=3, token_counts=(1, 8)),
        routing=RoutingSpec(deterministic_output=False),
        device="cuda" if limits else "cpu",
        limits=limits,
    )


def test_routes_may_be_added_in_the_order_of_arrival_above_eight_tokens(layer: Layer) -> None:
    for tokens in (9, 700):
        plan = arriving(layer, HOPPER, tokens)
        assert [variant.reduction for variant in plan.variants] == ["ordered", "ordered", "atomic"]
        assert plan.reduction == "atomic"
        assert "in the order of arrival, in launches that say atomic" in plan.explain()
        assert "atomic sum" in plan.explain()
        assert set(plan.compile_keys()) - set(counted(layer, max_tokens=tokens, token_counts=()).compile_keys())
    assert make_plan(layer, device="cuda", limits=HOPPER).reduction == "ordered"


@pytest.mark.parametrize(
    ("limits", "tokens", "dtype", "words"),
    [
        (HOPPER, 8, "bfloat16", "up to 8 tokens takes moe_small"),
        (HOPPER, 700, "float32", "takes op_by_op.*float32"),
        (None, 700, "bfloat16", "takes op_by_op.*the device is a CPU"),
    ],
)
def test_an_order_of_arrival_that_no_launch_has_is_refused_with_the_reasons(
    layer: Layer, limits: DeviceLimits | None, tokens: int, dtype: str, words: str
) -> None:
    with pytest.raises(MoeValueError, match=f"deterministic_output=False: no launch can.*{words}"):
        arriving(layer, limits, tokens, dtype)


def test_products_of_bytes_are_named_by_the_plan(layer: Layer) -> None:
    spec = ActivationSpec(nonlinearity=LAWS[0], io_dtype="float16", arithmetic="bytes")
    plan = plan_execution(plan_weights(layer.source), **declarations(activation=spec), device="cuda", limits=HOPPER)
    assert "arithmetic: bytes" in plan.explain()
    assert [variant.arithmetic for variant in plan.variants] == ["unrounded"]  # 5.4 routes of an average expert
    few = plan_execution(
        plan_weights(layer.source),
        **declarations(activation=spec, capacity=ExecutionCapacity(max_tokens=2, top_k=3)),
        device="cuda",
        limits=HOPPER,
    )
    assert [variant.arithmetic for variant in few.variants] == ["bytes"]
    assert "bytes products" in few.explain()
    other = plan_weights(make_layer(codebook="mcg").source)
    with pytest.raises(MoeUnsupportedError, match=r"needs codebook mul1, got mcg.*`mcg`.*K 1 to 8"):
        plan_execution(other, **declarations(activation=spec))


def test_a_share_has_its_own_geometry(layer: Layer) -> None:
    extent = even_extents(384, 3)[1]
    geometry = plan_weights(layer.source, extent).geometry
    assert (geometry.num_experts, geometry.hidden_size, geometry.intermediate_size) == (5, 200, 128)
