"""Holds a layer for many tokens to the float64 reference on a GPU, under skewed routing and every cut of the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cute.moe_samples import (
    NAMES,
    Routes,
    error,
    expected,
    make_experts,
    make_routes,
    routes_of_counts,
    to_device,
)
from trellis_format.activations import Activation
from trellis_kernels.cute.prefill_plan import plan_prefill
from trellis_kernels.errors import KernelTypeError, KernelValueError
from trellis_prep import PreparedExperts

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import compiler
from trellis_kernels.cute.prefill_layer import PrefillLayer

BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-3}

gpu = pytest.mark.gpu


def plan_of(experts: PreparedExperts, routes: Routes, *, out_dtype: torch.dtype = torch.float32, **changes):
    plan = plan_prefill(
        experts.source,
        arch="sm_90a",
        max_tokens=routes.x.shape[0],
        top_k=routes.ids.shape[1],
        x_dtype=NAMES[routes.x.dtype],
        out_dtype=NAMES[out_dtype],
        weight_dtype=NAMES[routes.weights.dtype],
    )
    return replace(plan, **changes)


def run(experts: PreparedExperts, routes: Routes, plan, **options) -> torch.Tensor:
    """Launch once with a poisoned scratch and output; the result on the host."""
    scratch = torch.full((plan.scratch_nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
    layer = PrefillLayer(to_device(experts), plan=plan, scratch=scratch)
    dtype = {name: kind for kind, name in NAMES.items()}[plan.out_dtype]
    out = torch.full((routes.x.shape[0], plan.hidden), float("nan"), dtype=dtype, device="cuda")
    layer(*(tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)), out, **options)
    return out.cpu()


def check(experts: PreparedExperts, routes: Routes, bound: float = 1e-3, **changes) -> torch.Tensor:
    found = run(experts, routes, plan_of(experts, routes, **changes), factor=experts.source.up_divisor)
    distance = error(found, expected(experts, routes))
    assert distance <= bound, distance
    return found


@gpu
@pytest.mark.parametrize("joint", [False, True])
def test_a_layer_of_ragged_experts(joint: bool) -> None:
    experts = make_experts(experts=8, hidden=384, intermediate=384, joint=joint)
    counts = [0, 1, 31, 33, 128, 129, 300, 64]
    check(experts, routes_of_counts(experts, counts), 5e-4)


@gpu
@pytest.mark.parametrize("codebook", ["lut_e4m3", "lut_fp16"])
@pytest.mark.parametrize("engine", ["wgmma_short", "wgmma_tall"])
def test_codebooks_with_tables(codebook: str, engine: str) -> None:
    rates = {"lut_e4m3": ["2", "4"], "lut_fp16": ["5"]}[codebook]
    experts = make_experts(codebook=codebook, rates=rates, intermediate=384)
    check(experts, make_routes(experts, 90), engine=engine)


@gpu
@pytest.mark.parametrize(
    ("codebook", "law"),
    [
        ("mul1", Activation("silu")),
        ("mul1", Activation("relu2")),
        ("mcg", Activation("silu")),
        ("3inst", Activation("silu")),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_height_of_row_blocks(codebook: str, law: Activation) -> None:
    """Nor on whether lanes or products of the warp finish the decoding."""
    experts = make_experts(experts=8, codebook=codebook, hidden=384, intermediate=384, activation=law, biased=True)
    routes = routes_of_counts(experts, [0, 1, 31, 33, 96, 97, 300, 64])
    tall = check(experts, routes, engine="wgmma_tall")
    for engine in ("wgmma_short", "wgmma_middle"):
        assert torch.equal(check(experts, routes, engine=engine), tall), engine


@gpu
def test_routes_that_are_none_add_nothing_and_tokens_without_routes_are_zeros() -> None:
    experts = make_experts()
    routes = make_routes(experts, 70)
    routes.ids[5] = -1
    routes.ids[6] = experts.source.geometry.num_experts
    found = check(experts, routes)
    assert torch.all(found[5:7] == 0)


@gpu
@pytest.mark.parametrize("law", [Activation("swigluoai", 1.5, 1.702, 1.0), Activation("relu2")], ids=lambda a: a.kind)
def test_laws_and_biases(law: Activation) -> None:
    experts = make_experts(activation=law, biased=True, intermediate=384, up_divisor=8.0)
    check(experts, make_routes(experts, 90))


@gpu
def test_rates_mixed_over_experts_and_projections() -> None:
    experts = make_experts(rates=["1.5", "3"], intermediate=256)
    check(experts, make_routes(experts, 90))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_and_widths_off_the_block(dtype: torch.dtype) -> None:
    experts = make_experts(hidden=328, intermediate=200, shared=True)
    routes = make_routes(experts, 40, dtype=dtype, weight_dtype=dtype, id_dtype=torch.int32)
    check(experts, routes, BOUNDS[dtype], out_dtype=dtype)


@gpu
def test_bits_depend_on_no_cut_of_the_work_nor_on_other_rows() -> None:
    experts = make_experts()
    routes = make_routes(experts, 200)
    whole = check(experts, routes)
    for changes in ({"chunk_tokens": 63}, {"window_slots": 104}, {"chunk_tokens": 200, "window_slots": 8 * 17}):
        assert torch.equal(run(experts, routes, plan_of(experts, routes, **changes)), whole), changes
    part = routes.part(slice(40, 47))
    assert torch.equal(run(experts, part, plan_of(experts, routes)), whole[40:47])


@gpu
@pytest.mark.parametrize("skew", ["zipf", "one_expert", "one_token_each"])
def test_skewed_routing(skew: str) -> None:
    experts = make_experts(experts=16, hidden=384, intermediate=256)
    counts = {
        "zipf": [1024 // (rank + 1) for rank in range(16)],
        "one_expert": [0] * 7 + [1500] + [0] * 8,
        "one_token_each": [1] * 16,
    }[skew]
    check(experts, routes_of_counts(experts, counts), 5e-4)


@gpu
@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_codebook_of_arithmetic(codebook: str, dtype: torch.dtype) -> None:
    experts = make_experts(codebook=codebook, hidden=256, intermediate=256)
    check(experts, make_routes(experts, 150, dtype=dtype), BOUNDS[dtype], out_dtype=dtype)


@gpu
def test_a_hundred_launches_have_the_same_bits() -> None:
    experts = make_experts()
    routes = make_routes(experts, 333)
    plan = plan_of(experts, routes)
    scratch = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device="cuda")
    layer = PrefillLayer(to_device(experts), plan=plan, scratch=scratch)
    moved = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
    outs = torch.full((100, 333, plan.hidden), float("nan"), device="cuda")
    for out in outs:
        scratch.fill_(0xFF)
        layer(*moved, out)
    assert torch.all(outs == outs[:1])
    assert error(outs[0].cpu(), expected(experts, routes)) <= 1e-3


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_atomic_reduction_is_near_the_ordered_one(dtype: torch.dtype) -> None:
    experts = make_experts(biased=True, intermediate=256, up_divisor=4.0)
    routes = make_routes(experts, 130, dtype=dtype)
    routes.ids[5] = -1
    changes = {"reduction": "atomic", "chunk_tokens": 70, "window_slots": 96}
    found = check(experts, routes, 2 * BOUNDS[dtype], out_dtype=dtype, **changes)
    assert torch.all(found[5] == 0)


@gpu
def test_a_launch_allocates_nothing() -> None:
    experts = make_experts()
    routes = make_routes(experts, 3000)
    plan = plan_of(experts, routes)
    scratch = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device="cuda")
    layer = PrefillLayer(to_device(experts), plan=plan, scratch=scratch)
    moved = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
    out = torch.empty(3000, plan.hidden, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    layer(*moved, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@gpu
def test_a_launch_can_be_captured_and_follows_its_inputs() -> None:
    experts = make_experts()
    routes = make_routes(experts, 50)
    plan = plan_of(experts, routes)
    compiler.precompile(plan.keys)
    scratch = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device="cuda")
    layer = PrefillLayer(to_device(experts), plan=plan, scratch=scratch)
    moved = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
    out = torch.empty(50, plan.hidden, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*moved, out)
    other = make_routes(experts, 50, seed=9)
    for tensor, value in zip(moved, (other.x, other.ids, other.weights), strict=True):
        tensor.copy_(value)
    scratch.fill_(0xFF)
    out.fill_(float("nan"))
    graph.replay()
    assert error(out.cpu(), expected(experts, other)) <= 1e-3


@gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_expert_map_gives_local_experts(dtype: torch.dtype) -> None:
    experts = make_experts()
    routes = make_routes(experts, 40)
    local = torch.tensor([3, -1, 0, 4, 1], dtype=dtype)
    known = routes.ids >= 0
    mapped = replace(routes, ids=torch.where(known, local[routes.ids.clamp_min(0)].long(), -1))
    found = run(experts, routes, plan_of(experts, routes), expert_map=local.cuda())
    assert error(found, expected(experts, mapped)) <= 1e-3


def test_experts_on_the_host_are_refused() -> None:
    experts = make_experts()
    plan = plan_of(experts, make_routes(experts, 10))
    with pytest.raises(KernelTypeError, match="CUDA device, got cpu"):
        PrefillLayer(experts, plan=plan, scratch=torch.empty(plan.scratch_nbytes, dtype=torch.uint8))


@gpu
def test_a_scratch_or_plan_that_does_not_fit_is_refused() -> None:
    experts = make_experts()
    plan = plan_of(experts, make_routes(experts, 10))
    device = to_device(experts)
    short = torch.empty(plan.scratch_nbytes - 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(KernelValueError, match=str(plan.scratch_nbytes)):
        PrefillLayer(device, plan=plan, scratch=short)
    shifted = torch.empty(plan.scratch_nbytes + 16, dtype=torch.uint8, device="cuda")[16:]
    with pytest.raises(KernelValueError, match="got 16 past one"):
        PrefillLayer(device, plan=plan, scratch=shifted)
    whole = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(KernelValueError, match="width = 512, the experts 256"):
        PrefillLayer(device, plan=replace(plan, width=512), scratch=whole)
