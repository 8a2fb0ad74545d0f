"""Holds the choice of a fused path to the launch's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.samples import Layer, make_layer
from trellis_format.extent import TrellisExtent
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, PrefillPlan
from trellis_moe import ActivationSpec, ExecutionCapacity, RoutingSpec, plan_weights
from trellis_moe.fused import Choice, Declarations, choose_fused
from trellis_moe.scratch import fused_scratch, total_bytes

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("2", "3"), intermediate=256)


def choice(
    layer: Layer,
    *,
    tokens: int = 4,
    top_k: int = 2,
    bound: int | None = None,
    limits: DeviceLimits = HOPPER,
    arithmetic: str = "exact",
    route_experts: int | None = None,
    routing: RoutingSpec = RoutingSpec(),  # noqa: B008  # frozen
    **changes: object,
) -> Choice:
    law = layer.source.activation
    assert law is not None
    weights = plan_weights(layer.source)
    declared = Declarations(
        replace(weights, **changes) if changes else weights,
        ActivationSpec(nonlinearity=law, io_dtype="bfloat16", arithmetic=arithmetic),
        routing,
        ExecutionCapacity(max_tokens=tokens, top_k=top_k, scratch_bound=bound, route_experts=route_experts),
        limits,
    )
    return choose_fused(declared, tokens)


def test_routes_of_an_average_expert_decide(layer: Layer) -> None:
    experts = layer.source.geometry.num_experts
    few, many = choice(layer, tokens=8 * experts), choice(layer, tokens=8 * experts + 1)
    assert isinstance(few.fused, MoeSmallKey)
    assert few.rejected == ()
    assert isinstance(many.fused, PrefillPlan)
    assert many.rejected == (("moe_small", "16.4 routes of an average expert, at most 16"),)


def test_many_routes_of_a_token_take_the_path_of_many_tokens(layer: Layer) -> None:
    assert isinstance(choice(layer, tokens=1, top_k=32).fused, MoeSmallKey)
    many = choice(layer, tokens=1, top_k=33)
    assert isinstance(many.fused, PrefillPlan)
    assert many.rejected == (("moe_small", "33 routes of a token, at most 32"),)


def test_an_empty_share_takes_neither(layer: Layer) -> None:
    empty = TrellisExtent(global_intermediate_size=256, first_slot=0, slot_count=0)
    found = choice(layer, extent=empty)
    assert found.fused is None
    assert found.rejected == tuple((path, "the share has no channels") for path in ("moe_small", "prefill"))


def test_a_target_without_wgmma_takes_both(layer: Layer) -> None:
    ampere = DeviceLimits(arch="sm_80", multiprocessors=108)
    assert isinstance(choice(layer, limits=ampere).fused, MoeSmallKey)
    many = choice(layer, tokens=10_000, limits=ampere)
    assert isinstance(many.fused, PrefillPlan)
    assert many.fused.engine == "mma"


def test_route_weights_on_the_input_take_neither(layer: Layer) -> None:
    found = choice(layer, routing=RoutingSpec(apply_router_weight_on_input=True))
    assert found.fused is None
    assert found.rejected[0] == ("moe_small", "it multiplies route weights into what experts give")


@pytest.mark.parametrize(("codebook", "rate"), [("lut_e4m3", "3"), ("lut_fp16", "5")])
def test_codebooks_of_tables_are_fused(codebook: str, rate: str) -> None:
    layer = make_layer(codebook=codebook, rates=(rate,), intermediate=256)
    for tokens in (1, 9):
        few = choice(layer, tokens=tokens)
        assert isinstance(few.fused, MoeSmallKey)
        assert few.fused.codebook == codebook
        assert few.rejected == ()
    many = choice(layer, tokens=10_000)
    assert isinstance(many.fused, PrefillPlan)
    assert many.fused.codebook == codebook


def test_unrounded_products_are_taken_where_asked(layer: Layer) -> None:
    for tokens in (1, 20):
        few = choice(layer, tokens=tokens, arithmetic="unrounded").fused
        assert isinstance(few, MoeSmallKey)
        assert few.arithmetic == "unrounded"
    many = choice(layer, tokens=10_000, arithmetic="unrounded").fused
    assert isinstance(many, PrefillPlan)


@pytest.mark.parametrize(("fitting", "tokens"), [(1, 1), (3, 3), (7, 7), (8, 8), (9, 8), (19, 16)])
def test_a_bound_of_scratch_shortens_a_launch_of_few_tokens(layer: Layer, fitting: int, tokens: int) -> None:
    whole = choice(layer, tokens=20)
    assert isinstance(whole.fused, MoeSmallKey)
    needed = total_bytes(fused_scratch(whole.fused, fitting))
    found = choice(layer, tokens=20, bound=needed)
    assert found.tokens == tokens
    assert isinstance(found.fused, MoeSmallKey)
    assert total_bytes(fused_scratch(found.fused, found.tokens)) <= needed


@pytest.mark.parametrize(("fitting", "taken"), [(1, False), (2, True), (3, False), (9, True)])
def test_no_part_of_a_cut_run_begins_off_a_boundary(fitting: int, taken: bool) -> None:
    narrow = make_layer(rates=("2",), hidden=132, intermediate=128)  # 264 bytes of a row of x
    whole = choice(narrow, tokens=20)
    assert isinstance(whole.fused, MoeSmallKey)
    found = choice(narrow, tokens=20, bound=total_bytes(fused_scratch(whole.fused, fitting)))
    assert isinstance(found.fused, MoeSmallKey) == taken
    if not taken:
        assert f"parts of {fitting} tokens" in dict(found.rejected)["moe_small"]


def test_a_bound_below_one_token_rejects_few_tokens_with_both_numbers(layer: Layer) -> None:
    found = choice(layer, bound=1000)
    assert found.rejected[0][0] == "moe_small"
    assert "one token needs" in found.rejected[0][1]
    assert "the bound is 1000" in found.rejected[0][1]


def test_products_of_bytes_are_taken_where_few_routes_share_an_expert(layer: Layer) -> None:
    few, more = (choice(layer, tokens=tokens, arithmetic="bytes").fused for tokens in (10, 11))
    assert isinstance(few, MoeSmallKey)
    assert isinstance(more, MoeSmallKey)
    assert (few.arithmetic, more.arithmetic) == ("bytes", "unrounded")
    exact = choice(layer, tokens=1).fused
    assert isinstance(exact, MoeSmallKey)
    assert exact.arithmetic == "exact"


def test_a_rank_with_some_experts_chooses_as_one_with_all(layer: Layer) -> None:
    """Five experts of twenty take the path and the tilings that twenty take, so that a route's bits are the same."""
    whole = make_layer(experts=20, rates=("2", "3"), intermediate=256)
    for tokens in (1, 41, 160, 161):
        mine, all_ = choice(layer, tokens=tokens, route_experts=20).fused, choice(whole, tokens=tokens).fused
        assert type(mine) is type(all_)
        if isinstance(mine, MoeSmallKey):
            assert isinstance(all_, MoeSmallKey)
            assert (mine.up, mine.down, mine.row_columns) == (all_.up, all_.down, all_.row_columns)
