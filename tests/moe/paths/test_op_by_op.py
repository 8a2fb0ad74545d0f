"""Holds the path of one op after the other to the float64 reference, over laws, rates, shapes and dtypes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.samples import (
    BOUNDS,
    LAWS,
    Routes,
    bits,
    distance,
    launch,
    make_binding,
    make_layer,
    make_plan,
    make_routes,
    run,
    truth,
    with_weights,
)
from trellis_format.activations import Activation
from trellis_format.codebooks import CODEBOOKS
from trellis_format.source import Projection
from trellis_kernels import code_banks
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    MoeUnsupportedError,
    RoutingSpec,
    plan_execution,
    plan_weights,
    prepare_weights,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RATES = [
    pytest.param(name, str(rate), id=f"{name}-{rate}")
    for name, codebook in CODEBOOKS.items()
    for rate in codebook.legal_rates
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_each_law_and_dtype_is_near_the_reference(law: Activation, dtype: torch.dtype, device: str) -> None:
    layer = make_layer(activation=law, rates=("2",))
    routes = make_routes(layer, 9, 3, dtype=dtype)
    assert distance(run(layer, routes, device=device), truth(layer, routes)) <= BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("codebook", "rate"), RATES)
def test_each_codebook_and_rate_is_near_the_reference(codebook: str, rate: str, device: str) -> None:
    layer = make_layer(experts=2, hidden=128, intermediate=256, codebook=codebook, rates=(rate,))
    routes = make_routes(layer, 3, 2)
    assert distance(run(layer, routes, device=device), truth(layer, routes)) <= 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "geometry",
    [
        {"rates": ("1", "2.5", "4", "8", "3.5")},
        {"rates": ("1", "6", "8"), "experts": 4},
        {"rates": ("2", "7"), "experts": 2, "activation": LAWS[5]},
        {"biased": True, "hidden": 200, "intermediate": 320, "activation": LAWS[4]},
        {"biased": True, "hidden": 1, "intermediate": 1, "experts": 2},
        {"biased": True, "activation": LAWS[5], "hidden": 129},
        {"shared": True, "rates": ("2.5",)},
        {"shared": True, "activation": LAWS[5]},
        {"up_divisor": 128.0},
        {"experts": 1, "hidden": 128, "intermediate": 128},
        {"experts": 300, "hidden": 128, "intermediate": 128, "rates": ("1",)},
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (3, 64), (33, 2)])
def test_odd_layers_are_near_the_reference(geometry: dict[str, Any], tokens: int, top_k: int, device: str) -> None:
    layer = make_layer(**geometry)
    routes = make_routes(layer, tokens, top_k)
    routes.ids[0, 0] = 0  # a token with an expert, or the truth is zero
    assert distance(run(layer, routes, device=device), truth(layer, routes)) <= 1e-3


@pytest.mark.parametrize("projection", Projection)
def test_a_bias_is_added_after_the_output_scale(projection: Projection) -> None:
    layer = make_layer(biased=True, experts=2)
    routes = make_routes(layer, 5, 2)
    larger = {name: bias * (3 if name is projection else 1) for name, bias in layer.weights.biases.items()}
    changed = with_weights(layer, biases=larger)
    assert distance(run(changed, routes), truth(changed, routes)) <= 1e-3
    assert distance(truth(changed, routes), truth(layer, routes)) > 0.1


def test_the_up_divisor_multiplies_the_weights() -> None:
    layer = make_layer()
    routes = make_routes(layer, 5, 2)
    divided = replace(layer, source=replace(layer.source, up_divisor=128.0))
    assert bits(run(divided, routes)) == bits(run(layer, Routes(routes.x, routes.ids, routes.weights * 128.0)))


@pytest.mark.parametrize("size", [2.0**-20, 2.0**-12, 1.0, 2.0**6], ids="{:g}".format)
def test_scales_of_any_size_that_float16_holds_keep_their_precision(size: float) -> None:
    """Output vectors meet float32 sums, so even subnormal ones lose nothing; 2^-20 is 16 steps of float16."""
    layer = make_layer(experts=2)
    outputs = (layer.weights.output_scales / abs(layer.weights.output_scales) * size).astype("float16")
    changed = with_weights(layer, output_scales=outputs)
    routes = make_routes(layer, 5, 2)
    assert distance(run(changed, routes), truth(changed, routes)) <= 1e-3


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("power", [-40, -20, -4, 5, 20, 40])
def test_inputs_of_any_size_that_float32_holds_keep_their_precision(law: Activation, power: int) -> None:
    if power > 0 and (law.kind == "situ" or not math.isinf(law.limit)):
        pytest.skip("a law with bounds turns the rounding of large branches into absolute errors near its bends")
    layer = make_layer(experts=2, activation=law, biased=law.gated, hidden=200)
    routes = make_routes(layer, 5, 2, dtype=torch.float32)
    routes.x.mul_(2.0**power)
    assert distance(run(layer, routes), truth(layer, routes)) <= 1e-3


def test_a_row_of_another_size_changes_no_other_row() -> None:
    layer = make_layer(experts=2)
    routes = make_routes(layer, 6, 2, dtype=torch.float32)
    plain = run(layer, routes)
    routes.x[3] *= 2.0**-30
    routes.x[4] *= 2.0**30
    found = run(layer, routes)
    others = [0, 1, 2, 5]
    assert bits(found[others]) == bits(plain[others])
    assert bits(found[3:5]) != bits(plain[3:5])


def test_a_power_of_two_in_x_is_one_in_a_law_without_bias_and_gate() -> None:
    """relu2 squares, so that x of half the size gives a quarter, to the last bit."""
    layer = make_layer(experts=2, activation=LAWS[5])
    routes = make_routes(layer, 5, 2, dtype=torch.float32)
    plain = run(layer, routes)
    half = Routes(routes.x * 0.5, routes.ids, routes.weights)
    assert bits(run(layer, half)) == bits(plain * 0.25)


def test_banks_hold_each_projection_of_each_expert() -> None:
    layer = make_layer(rates=("1", "2.5", "4", "8"))
    experts = prepare_weights(make_plan(layer).weights, layer.weights)
    banks = code_banks(experts)
    assert [(bank.k, bank.n) for bank in banks] == [(256, 384), (256, 384), (384, 256)]
    for index, bank in enumerate(banks):
        assert bank.codebook == "mul1"
        assert [tuple(pair) for pair in bank.descriptors.tolist()] == list(bank.places)
        for expert in range(5):
            codes, rate = bank.tiles(expert)
            assert rate == layer.source.rates.rate(expert, index)
            assert bits(codes) == layer.weights.code_view(expert, index).read().tobytes()


@pytest.mark.gpu
def test_devices_agree() -> None:
    layer = make_layer(rates=("1", "2.5", "4", "8"), biased=True, hidden=200, intermediate=320)
    routes = make_routes(layer, 33, 3)
    assert distance(run(layer, routes, device="cuda"), run(layer, routes)) <= 1e-3


@pytest.mark.gpu
def test_a_graph_is_refused_with_the_ops_and_the_reasons() -> None:
    layer = make_layer(rates=("3",))
    plan = make_plan(layer, tokens=4, top_k=2, device="cuda", reference=True)
    binding, routes = make_binding(layer, plan), make_routes(layer, 4, 2)
    inputs = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
    graph, out = torch.cuda.CUDAGraph(), torch.empty(4, 256, device="cuda")
    refused = pytest.raises(MoeUnsupportedError, match=r"grouped_gemm.* run on the torch backend.*reference backend")
    with refused, torch.cuda.graph(graph):
        binding.run(*inputs, out=out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("geometry", [{"biased": True}, {"shared": True}, {"activation": LAWS[5]}], ids=str)
def test_route_weights_may_belong_to_the_input(geometry: dict[str, Any], device: str) -> None:
    layer = make_layer(up_divisor=128.0, **geometry)
    routes = make_routes(layer, 9, 1)
    routes.ids[0, 0] = 0
    routes.ids[3], routes.weights[3] = -1, float("nan")
    weights = torch.where(routes.ids >= 0, routes.weights, 0.0)
    weighted = Routes(routes.x.float() * weights, routes.ids, torch.ones_like(weights))
    law = layer.source.activation
    assert law is not None
    plan = plan_execution(
        plan_weights(layer.source),
        activation=ActivationSpec(nonlinearity=law, io_dtype="float16"),
        capacity=ExecutionCapacity(max_tokens=9, top_k=1),
        routing=RoutingSpec(apply_router_weight_on_input=True),
        device=device,
    )
    assert plan.variants[0].path == "op_by_op"
    assert "route weights multiply what experts take" in plan.explain()
    found = launch(make_binding(layer, plan), routes)
    assert distance(found, truth(layer, weighted)) <= 1e-3
    assert bits(found[3]) == bytes(256 * 4)
    assert distance(truth(layer, weighted), truth(layer, Routes(routes.x, routes.ids, weights))) > 0.01
