"""Holds rows of single routes, wherever they were computed, to the bits of one launch when they are added."""

from __future__ import annotations

import pytest
import torch

from moe.samples import bits, make_layer, make_plan, make_routes
from trellis_moe import RoutingSpec, bind, plan_execution, prepare_weights
from trellis_moe.parallel.rows import RouteRows, row_bytes, row_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "weighed"), [(5, False), (200, False), (5, True)], ids=["few", "many", "weighed"])
def test_rows_of_two_halves_add_up_to_the_bits_of_the_whole(device: str, tokens: int, weighed: bool) -> None:
    layer = make_layer(experts=5, hidden=248, intermediate=256, biased=True, up_divisor=4.0)
    if device == "cpu":
        tokens = min(tokens, 20)
    routes = make_routes(layer, tokens, 3)
    plan = make_plan(layer, tokens=tokens, top_k=3, device=device, output_dtype="float16")
    if weighed:
        routing = RoutingSpec(apply_router_weight_on_input=True)
        plan = plan_execution(
            plan.weights, activation=plan.activation, capacity=plan.capacity, routing=routing, device=device
        )
    experts = prepare_weights(plan.weights, layer.weights, device=device)
    arena = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8, device=device)
    binding = bind(plan, experts, arena)
    x, ids, weights = (tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights))
    whole = torch.full(x.shape, float("nan"), dtype=torch.float16, device=device)
    binding.run(x, ids, weights, out=whole)
    variant = plan.variant_for(tokens)
    assert row_tokens(variant) >= tokens
    held = RouteRows(plan, variant, arena, torch.ones(tokens, 3, device=device))
    total = None
    for half in (ids < 2, ids >= 2):
        arena.fill_(0xFF)
        held.clear(tokens)
        mine = torch.where(half, ids, torch.full_like(ids, -1))
        binding.launch(variant, x, mine, weights, out=torch.empty_like(whole))
        rows = held.take(tokens)
        assert rows.shape == (tokens, 3, 256)
        assert rows.element_size() * rows[0].numel() == row_bytes(plan, variant)
        assert not rows[~half].any()
        total = rows.clone() if total is None else total + rows
    assert total is not None
    found = torch.full_like(whole, float("nan"))
    assert held.add(total, ids, weights, found) is found
    assert bits(found) == bits(whole)
    assert found.isfinite().all()


def test_a_weight_of_a_dropped_route_does_not_count() -> None:
    layer = make_layer(experts=2, hidden=128, intermediate=128)
    routes = make_routes(layer, 2, 2)
    routes.ids[0] = torch.tensor([-1, 2])
    routes.weights[0] = float("nan")
    plan = make_plan(layer, tokens=2, top_k=2)
    arena = torch.zeros(plan.required_nbytes(), dtype=torch.uint8)
    held = RouteRows(plan, plan.variants[0], arena, torch.ones(2, 2))
    out = torch.full((2, 128), float("nan"))
    held.add(torch.ones(2, 2, 128), routes.ids, routes.weights, out)
    assert not out[0].any()
    assert out[1].isfinite().all()
