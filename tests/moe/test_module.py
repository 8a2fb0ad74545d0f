"""Holds the module to the bits of a binding, to graphs of torch.compile, and to its share of a layer."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe.parallel.ranks import run_ranks
from moe.parallel.tasks import run_modules
from moe.samples import Layer, bits, distance, make_binding, make_layer, make_plan, make_routes, truth
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    MoeTypeError,
    MoeValueError,
    RoutingSpec,
    TrellisMoE,
)
from trellis_moe.parallel import ParallelPlan, ReduceSpec
from trellis_prep import even_extents

CAPACITY = ExecutionCapacity(max_tokens=9, top_k=3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(experts=4, hidden=256, intermediate=256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_forward_is_near_float64(layer: Layer, device: str, dtype: torch.dtype) -> None:
    routes = make_routes(layer, 9, 3, dtype=dtype)
    module = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, dtype=dtype, device=device)
    y = module(*(tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights)))
    assert (y.dtype, y.shape, y.device.type) == (dtype, routes.x.shape, device)
    assert distance(y.cpu(), truth(layer, routes)) <= (4e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_over_a_plan_gives_the_bits_of_its_binding(layer: Layer, device: str) -> None:
    routes = make_routes(layer, 9, 3)
    plan = make_plan(layer, tokens=9, top_k=3, device=device)
    binding = make_binding(layer, plan)
    arguments = [tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights)]
    wanted = binding.run(*arguments, out=torch.full(routes.x.shape, float("nan"), device=device))
    module = TrellisMoE.from_prepared(plan, binding.experts)
    assert bits(module(*arguments)) == bits(wanted)
    assert module.plan is plan
    assert module.prepared is binding.experts


@pytest.mark.parametrize("device", DEVICES)
def test_x_may_begin_anywhere(layer: Layer, device: str) -> None:
    routes = make_routes(layer, 4, 3)
    module = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, dtype=torch.float16, device=device)
    x, ids, weights = (tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights))
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device)
    moved = memory[1:].view(x.shape).copy_(x)
    assert moved.data_ptr() % 16 == 2
    assert bits(module(moved, ids, weights)) == bits(module(x, ids, weights))


@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_weights_of_any_dtype_are_taken(layer: Layer, device: str) -> None:
    routes = make_routes(layer, 4, 3, dtype=torch.bfloat16)
    module = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, device=device)
    x, ids, weights = (tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights.bfloat16()))
    wanted = module(x, ids, weights.float())
    assert bits(module(x, ids.int(), weights)) == bits(wanted)
    apart = torch.stack((x, x), dim=1)[:, 0]
    assert not apart.is_contiguous()
    assert bits(module(apart, ids, weights)) == bits(wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_whole_it_gives_the_same_bits(layer: Layer, device: str) -> None:
    module = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, device=device)

    def block(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + module(x, ids, weights)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for tokens in (9, 2):
        routes = make_routes(layer, tokens, 3, dtype=torch.bfloat16)
        arguments = [tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights)]
        assert bits(compiled(*arguments)) == bits(block(*arguments))


@pytest.mark.gpu
def test_a_graph_holds_a_forward(layer: Layer) -> None:
    module = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, device="cuda")
    routes = make_routes(layer, 9, 3, dtype=torch.bfloat16)
    arguments = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
    module(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(*arguments)
    other = make_routes(layer, 9, 3, dtype=torch.bfloat16, seed=5)
    for held, fresh in zip(arguments, (other.x, other.ids, other.weights), strict=True):
        held.copy_(fresh)
    graph.replay()
    found = y.clone()
    assert bits(found) == bits(module(*arguments))


def test_shares_alone_are_partial_sums(layer: Layer) -> None:
    routes = make_routes(layer, 9, 3)
    wanted = truth(layer, routes)
    spec = ActivationSpec(nonlinearity=layer.source.activation, io_dtype="float16")  # type: ignore[arg-type]  # is stated
    arguments = (routes.x, routes.ids, routes.weights)
    common = {"capacity": CAPACITY, "activation": spec, "device": "cpu"}
    extents, ranges = even_extents(256, 2), ([2, 0, 1], range(3, 4))
    channels = [TrellisMoE(layer.source, layer.weights, extent=extent, **common) for extent in extents]
    experts = [TrellisMoE(layer.source, layer.weights, experts=ids, **common) for ids in ranges]
    for modules in (channels, experts):
        total = torch.stack([module(*arguments).double() for module in modules]).sum(0)
        assert distance(total, wanted) <= 1e-3
        assert all(distance(module(*arguments), wanted) > 0.1 for module in modules)
    assert not TrellisMoE(layer.source, layer.weights, experts=[], **common)(*arguments).any()


def test_layers_may_share_a_scratch(layer: Layer) -> None:
    asked: list[int] = []

    def give(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return arena

    routes = make_routes(layer, 9, 3, dtype=torch.bfloat16)
    alone = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, device="cpu")
    assert isinstance(alone.plan, ParallelPlan)
    arena = torch.full((alone.plan.required_nbytes(),), 0xFF, dtype=torch.uint8)
    shared = [
        TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, device="cpu", scratch=scratch)
        for scratch in (arena, give)
    ]
    wanted = bits(alone(routes.x, routes.ids, routes.weights))
    for module in (*shared, *shared):
        assert bits(module(routes.x, routes.ids, routes.weights)) == wanted
    assert asked == [alone.plan.required_nbytes()]


def test_it_has_no_state_and_no_copies(layer: Layer) -> None:
    module = TrellisMoE(layer.source, layer.weights, capacity=CAPACITY, device="cpu")
    assert not module.state_dict()
    assert not list(module.parameters())
    assert "4 experts, 256 x 256 of 256, top 3, 9 tokens" in repr(module)
    with pytest.raises(MoeTypeError, match="cannot be copied or pickled"):
        copy.deepcopy(module)


def test_what_is_refused(layer: Layer) -> None:
    source, weights = layer.source, layer.weights
    with pytest.raises(MoeValueError, match="the source states no activation"):
        TrellisMoE(replace(source, activation=None), weights, capacity=CAPACITY, device="cpu")
    with pytest.raises(MoeValueError, match="cannot cross in float16"):
        TrellisMoE(source, weights, capacity=CAPACITY, device="cpu", reduce=ReduceSpec(dtype="float16"))
    module = TrellisMoE(source, weights, capacity=CAPACITY, device="cpu", routing=RoutingSpec())
    routes = make_routes(layer, 10, 3, dtype=torch.bfloat16)
    with pytest.raises(MoeValueError, match="10 tokens exceed the plan's 9"):
        module(routes.x, routes.ids, routes.weights)
    with pytest.raises(MoeTypeError, match=r"x must be torch\.bfloat16, got torch\.float32"):
        module(routes.x[:9].float(), routes.ids[:9], routes.weights[:9])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_a_module(tmp_path: Path, world: int) -> None:
    ranks = run_ranks(tmp_path, world, run_modules, None, 6)
    whole = ranks[0]["whole"]
    for found in ranks:
        assert bits(found["expert"]) == bits(found["compiled"]) == bits(whole)
        assert bits(found["tensor"]) == bits(ranks[0]["tensor"])
        assert distance(found["tensor"], whole) <= 8e-3
