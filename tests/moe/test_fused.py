"""Holds the choice of a fused path to the launch's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.samples import Layer, make_layer
from trellis_format.extent import TrellisExtent
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, PrefillPlan
from trellis_moe import ActivationSpec, ExecutionCapacity, RoutingSpec, plan_weights
from trellis_moe.fused import Fused, choose_fused

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("2", "3"), intermediate=256)


def choice(
    layer: Layer, *, tokens: int = 4, top_k: int = 2, limits: DeviceLimits = HOPPER, **changes: object
) -> Fused | None:
    law = layer.source.activation
    assert law is not None
    weights = plan_weights(layer.source)
    return choose_fused(
        replace(weights, **changes) if changes else weights,
        ActivationSpec(nonlinearity=law, io_dtype="bfloat16"),
        RoutingSpec(),
        ExecutionCapacity(max_tokens=tokens, top_k=top_k),
        limits,
    )


def test_routes_of_an_average_expert_decide(layer: Layer) -> None:
    experts = layer.source.geometry.num_experts
    assert isinstance(choice(layer, tokens=8 * experts), MoeSmallKey)
    assert isinstance(choice(layer, tokens=8 * experts + 1), PrefillPlan)


def test_many_routes_of_a_token_take_the_path_of_many_tokens(layer: Layer) -> None:
    assert isinstance(choice(layer, tokens=1, top_k=32), MoeSmallKey)
    assert isinstance(choice(layer, tokens=1, top_k=33), PrefillPlan)


def test_an_empty_share_takes_neither(layer: Layer) -> None:
    empty = TrellisExtent(global_intermediate_size=256, first_slot=0, slot_count=0)
    assert choice(layer, extent=empty) is None


def test_a_target_without_wgmma_takes_few_tokens_alone(layer: Layer) -> None:
    ampere = DeviceLimits(arch="sm_80", multiprocessors=108)
    assert isinstance(choice(layer, limits=ampere), MoeSmallKey)
    assert choice(layer, tokens=10_000, limits=ampere) is None


def test_codebooks_of_tables_take_neither() -> None:
    assert choice(make_layer(codebook="lut_e4m3", rates=("3",), intermediate=256)) is None
