"""Holds the fused path to the float64 reference and to its declarations."""

from __future__ import annotations

import pytest
import torch

from moe.samples import bits, distance, launch, make_binding, make_layer, make_plan, make_routes, truth
from trellis_kernels import KernelUnsupportedError
from trellis_kernels.layers import DeviceLimits, device_limits, precompile_layer
from trellis_moe import MoeTypeError
from trellis_moe.scratch import FUSED_ALIGNMENT, fused_scratch

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "capacity"), [(1, 9), (8, 9), (9, 9), (9, 300), (300, 300)])
def test_gpu_is_near_float64(tokens: int, capacity: int) -> None:
    layer = make_layer(rates=("1", "2.5", "4", "8"), biased=True, hidden=200, intermediate=320)
    plan = make_plan(layer, tokens=capacity, device="cuda")
    assert plan.fused is not None
    binding, routes = make_binding(layer, plan), make_routes(layer, tokens, 3)
    found = launch(binding, routes)
    assert distance(found, truth(layer, routes)) <= 1e-3
    assert bits(launch(binding, routes)) == bits(found)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [9, 300])
def test_gpu_replays_in_a_graph_after_routes_changed(capacity: int) -> None:
    layer = make_layer(rates=("3",), hidden=256, intermediate=384)
    binding = make_binding(layer, make_plan(layer, tokens=capacity, device="cuda"))
    first, second = make_routes(layer, 9, 3, seed=1), make_routes(layer, 9, 3, seed=2)
    x, ids, weights = first.x.cuda(), first.ids.cuda(), first.weights.cuda()
    out = torch.full((9, 256), float("nan"), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run(x, ids, weights, out=out)
    for routes in (second, first):
        x.copy_(routes.x)
        ids.copy_(routes.ids)
        weights.copy_(routes.weights)
        graph.replay()
        assert bits(out) == bits(launch(binding, routes))


@pytest.mark.gpu
def test_gpu_refuses_dtypes_that_were_not_declared() -> None:
    layer = make_layer(rates=("3",))
    binding = make_binding(layer, make_plan(layer, tokens=9, device="cuda"))
    routes = make_routes(layer, 9, 3)
    with pytest.raises(MoeTypeError, match=r"topk_ids must be torch.int64, got torch.int32"):
        launch(binding, type(routes)(routes.x, routes.ids.int(), routes.weights))


def test_scratch_leaves_room_for_the_boundary_of_the_kernels() -> None:
    layer = make_layer(rates=("3",))
    plan = make_plan(layer, device="cuda", limits=HOPPER)
    assert plan.fused is not None
    (buffer,) = fused_scratch(plan.fused, plan.capacity)
    assert plan.scratch == (buffer,)
    assert buffer.nbytes % 16 == 0
    assert FUSED_ALIGNMENT % 128 == 0


def test_compiling_a_layer_needs_no_gpu() -> None:
    pytest.importorskip("cutlass")
    layer = make_layer(rates=("3",))
    plan = make_plan(layer, device="cuda", limits=HOPPER)
    assert plan.fused is not None
    try:
        precompile_layer(plan.fused)
    except KernelUnsupportedError as error:  # a platform without the DSL says so
        pytest.skip(str(error))


def test_limits_are_those_of_a_visible_gpu() -> None:
    assert device_limits("cpu") is None
    if not torch.cuda.is_available():
        assert device_limits("cuda") is None
