"""Holds the fused path to the float64 reference and to its declarations."""

from __future__ import annotations

import pytest
import torch

from moe.samples import BOUNDS, bits, distance, launch, make_binding, make_layer, make_plan, make_routes, truth
from trellis_kernels import KernelUnsupportedError
from trellis_kernels.cute import compiler
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, device_limits, scratch_nbytes
from trellis_moe import MoeTypeError
from trellis_moe.scratch import FUSED_ALIGNMENT, align_fused, fused_scratch
from trellis_moe.session import make_ready

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "capacity"), [(1, 9), (8, 9), (9, 9), (9, 300), (300, 300)])
def test_gpu_is_near_float64(tokens: int, capacity: int) -> None:
    layer = make_layer(rates=("1", "2.5", "4", "8"), biased=True, hidden=200, intermediate=320)
    plan = make_plan(layer, tokens=capacity, device="cuda")
    assert plan.variants[-1].fused is not None
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_gpu_products_of_bytes_stay_inside_the_bound_of_every_layer(tokens: int, dtype: torch.dtype) -> None:
    layer = make_layer(rates=("3",), hidden=1024, intermediate=768)
    routes = make_routes(layer, tokens, 3, dtype=dtype)
    routes.ids[0, 0] = 0
    found = {}
    for arithmetic in ("exact", "unrounded", "bytes"):
        plan = make_plan(layer, tokens=5, top_k=3, dtype=dtype, device="cuda", arithmetic=arithmetic)
        assert [variant.arithmetic for variant in plan.variants] == [arithmetic]
        found[arithmetic] = launch(make_binding(layer, plan), routes)
        assert distance(found[arithmetic], truth(layer, routes)) <= BOUNDS[dtype]
    assert len({bits(out) for out in found.values()}) == len(found)


@pytest.mark.gpu
@pytest.mark.parametrize(("codebook", "rates"), [("lut_e4m3", ("2", "3", "4")), ("lut_fp16", ("5", "6"))], ids=str)
@pytest.mark.parametrize("capacity", [1, 9])
def test_gpu_codebooks_of_tables_are_fused_for_few_tokens(codebook: str, rates: tuple[str, ...], capacity: int) -> None:
    layer = make_layer(rates=rates, codebook=codebook, biased=True, hidden=200, intermediate=320)
    plan = make_plan(layer, tokens=capacity, device="cuda")
    assert [variant.path for variant in plan.variants] == ["moe_small"] * len(plan.variants)
    binding, routes = make_binding(layer, plan), make_routes(layer, capacity, 3)
    found = launch(binding, routes)
    assert distance(found, truth(layer, routes)) <= 1e-3
    assert bits(launch(binding, routes)) == bits(found)


def test_scratch_leaves_room_for_the_boundary_of_the_kernels() -> None:
    layer = make_layer(rates=("3",))
    plan = make_plan(layer, device="cuda", limits=HOPPER)
    (variant,) = plan.variants
    assert isinstance(variant.fused, MoeSmallKey)
    assert variant.scratch == fused_scratch(variant.fused, variant.tokens)
    assert plan.required_nbytes() == scratch_nbytes(variant.fused, 9) + FUSED_ALIGNMENT - 16
    assert FUSED_ALIGNMENT % 128 == 0
    for past in range(0, FUSED_ALIGNMENT, 16):
        arena = torch.zeros(2 * FUSED_ALIGNMENT + plan.required_nbytes(), dtype=torch.uint8)
        first = -arena.data_ptr() % FUSED_ALIGNMENT + past
        found = align_fused(arena[first : first + plan.required_nbytes()])
        assert found.data_ptr() % FUSED_ALIGNMENT == 0
        assert found.numel() >= scratch_nbytes(variant.fused, 9)


def test_compiling_a_layer_needs_no_gpu() -> None:
    pytest.importorskip("cutlass")
    layer = make_layer(rates=("3",))
    plan = make_plan(layer, device="cuda", limits=HOPPER)
    try:
        make_ready(plan)
    except KernelUnsupportedError as error:  # a platform without the DSL says so
        pytest.skip(str(error))
    assert torch.cuda.is_available() or not compiler.cold(plan.compile_keys())


def test_limits_are_those_of_a_visible_gpu() -> None:
    assert device_limits("cpu") is None
    if not torch.cuda.is_available():
        assert device_limits("cuda") is None
