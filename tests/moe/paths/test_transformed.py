"""Holds experts under an intermediate Hadamard to the float64 reference, whole and in shares."""

from __future__ import annotations

import pytest
import torch

from moe.samples import BOUNDS, Layer, Routes, bits, distance, launch, make_binding, make_plan, make_routes, run, truth
from slot_files import random_linears
from trellis_kernels.cute.op_keys import ReduceKey, RotateKey
from trellis_kernels.layers import DeviceLimits
from trellis_prep import even_extents

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(*random_linears(experts=4, hidden=512, intermediate=384, codebook="mcg", rates=(2, 3), transform=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (9, 3), (33, 2)])
def test_layers_are_near_the_reference(layer: Layer, tokens: int, top_k: int, dtype: torch.dtype, device: str) -> None:
    routes = make_routes(layer, tokens, top_k, dtype=dtype)
    routes.ids[0, 0] = 0
    assert distance(run(layer, routes, device=device), truth(layer, routes)) <= BOUNDS[dtype]


@pytest.mark.parametrize("codebook", ["lut_e4m3", "mul1"])
@pytest.mark.parametrize("shared", [False, True])
def test_other_codebooks_and_shared_vectors_are_too(codebook: str, shared: bool) -> None:
    layer = Layer(
        *random_linears(hidden=1024, intermediate=256, codebook=codebook, rates=(3,), shared=shared, transform=True)
    )
    routes = make_routes(layer, 7, 2)
    assert distance(run(layer, routes), truth(layer, routes)) <= 1e-3


def test_shares_are_near_their_reference_and_add_up(layer: Layer) -> None:
    routes = make_routes(layer, 9, 3)
    parts = []
    for extent in even_extents(384, 3):
        parts.append(run(layer, routes, extent=extent))
        assert distance(parts[-1], truth(layer, routes, extent=extent)) <= 1e-3
    assert distance(torch.stack(parts).double().sum(0), run(layer, routes)) <= 1e-5


def test_signs_matter(layer: Layer) -> None:
    routes = make_routes(layer, 9, 3)
    binding = make_binding(layer, make_plan(layer))
    plain = launch(binding, routes)
    for table in binding.experts.signs.values():
        table.neg_()
        assert distance(launch(binding, routes), plain) > 0.1
        table.neg_()
    assert bits(launch(binding, routes)) == bits(plain)


def test_tokens_are_apart_and_dropped_routes_add_nothing(layer: Layer) -> None:
    routes = make_routes(layer, 9, 3)
    routes.ids[4] = -1
    routes.x[4] = float("nan")
    found = run(layer, routes)
    assert bits(found[4]) == bytes(512 * 4)
    assert torch.isfinite(found).all()
    binding = make_binding(layer, make_plan(layer, tokens=9, top_k=3))
    alone = launch(binding, routes.part(slice(2, 3)))
    assert bits(alone) == bits(found[2:3])


def test_a_plan_says_why_it_is_not_fused_and_lists_its_kernels(layer: Layer) -> None:
    plan = make_plan(layer, device="cuda", limits=HOPPER)
    assert "not moe_small: it takes no intermediate Hadamard" in plan.explain()
    keys = plan.compile_keys()
    blocks = {(key.side, key.block) for key in keys if isinstance(key, RotateKey)}
    assert blocks == {("input", 128), ("input", 512), ("output", 128), ("output", 512)}
    assert {key.out_dtype for key in keys if isinstance(key, ReduceKey)} == {"float32"}
    assert {buffer.name for buffer in plan.variants[0].scratch} >= {"by_token", "interleaved"}


def test_inputs_of_any_size_keep_their_precision(layer: Layer) -> None:
    for size in (2.0**-30, 2.0**30):
        routes = make_routes(layer, 5, 2, dtype=torch.float32)
        sized = Routes(routes.x * size, routes.ids, routes.weights)
        assert distance(run(layer, sized), truth(layer, sized)) <= 1e-3
