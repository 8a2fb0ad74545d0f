"""Holds the fused few-token layer to the float64 reference on a GPU, and its checks anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_set import MoeCase, pytest_generate_tests  # noqa: F401
from kernels.cute.moe_samples import (
    Launch,
    Routes,
    error,
    expected,
    make_experts,
    make_key,
    make_routes,
    routes_of_counts,
)
from trellis_format.activations import Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.codebooks import CODEBOOKS, EXL3_CODEBOOKS
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_kernels.cute.moe_key import PRODUCT_ROWS, Tiling
from trellis_prep import prepare

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-3}
PAIRS = [
    pytest.param(name, str(rate), id=f"{name}-{rate}") for name in CODEBOOKS for rate in CODEBOOKS[name].legal_rates
]
LAWS = (
    Activation("silu"),
    Activation("silu", limit=0.75),
    Activation("gelu_tanh"),
    Activation("situ"),
    Activation("swigluoai", limit=1.5, alpha=1.702, beta=1.0),
    Activation("relu2"),
)

gpu = pytest.mark.gpu


def check(experts, routes: Routes, bound: float = 1e-3, **changes) -> torch.Tensor:
    """Launch once and compare with float64; returns the result."""
    key = make_key(experts, routes, **changes)
    found = Launch(experts, key, routes.x.shape[0])(routes)
    distance = error(found, expected(experts, routes))
    assert distance <= bound, f"{distance} for {key!r}"
    return found


@gpu
@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_every_codebook_and_rate(codebook: str, rate: str) -> None:
    experts = make_experts(codebook=codebook, rates=[rate])
    check(experts, make_routes(experts, 9), 5e-4)


@gpu
@pytest.mark.parametrize("rate", CODEBOOKS["mul1"].legal_rates, ids=lambda rate: f"bytes-{rate}")
def test_every_rate_of_bytes(rate) -> None:
    experts = make_experts(rates=[str(rate)])
    check(experts, make_routes(experts, 9), 6e-4, arithmetic="bytes")


@gpu
@pytest.mark.parametrize(("codebook", "rate"), [pair for pair in PAIRS if pair.values[0] in EXL3_CODEBOOKS])
def test_every_rate_of_unrounded_values(codebook: str, rate: str) -> None:
    experts = make_experts(codebook=codebook, rates=[rate])
    check(experts, make_routes(experts, 9), 6e-4, arithmetic="unrounded")


@gpu
@pytest.mark.parametrize("row_columns", [1, 2])
@pytest.mark.parametrize(
    ("codebook", "rates", "arithmetic"),
    [
        ("mul1", ["3", "1.5", "8"], "exact"),
        ("mul1", ["3", "3.5", "1"], "bytes"),
        ("mul1", ["4", "2.5", "2"], "bytes"),
        ("mcg", ["4", "3", "5"], "exact"),
        ("3inst", ["2", "6", "7"], "exact"),
        ("mul1", ["3", "1.5", "4"], "unrounded"),
        ("mcg", ["4", "3", "8"], "unrounded"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rereads", [False, True])
def test_steps_staged_in_shared_memory_give_the_same_bits(
    codebook, rates, arithmetic: str, row_columns: int, rereads: bool
) -> None:
    experts = make_experts(codebook=codebook, rates=rates, hidden=640, intermediate=384)
    routes = make_routes(experts, 19)
    common = {"arithmetic": arithmetic, "row_columns": row_columns}
    ring = check(
        experts, routes, up=Tiling(slices=2, stages=3, in_shared=True, rereads=rereads, split=2),
        down=Tiling(slices=2, stages=2, resident=4, in_shared=True, rereads=rereads), **common,
    )  # fmt: skip
    assert torch.equal(ring, check(experts, routes, up=Tiling(slices=2, split=2), down=Tiling(slices=2), **common))


@gpu
@pytest.mark.parametrize("rates", [["1.5", "3", "4"], ["8", "2.5", "5", "3", "6"], ["1", "2", "3.5", "7"]], ids=str)
def test_rates_mixed_over_experts_and_projections(rates: list[str]) -> None:
    experts = make_experts(rates=rates, intermediate=384)
    check(experts, make_routes(experts, 17), 5e-4, row_columns=2)


@gpu
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.kind}-{law.limit:g}")
def test_activations_and_biases(law: Activation, biased: bool) -> None:
    experts = make_experts(codebook="mcg", rates=["4"], activation=law, biased=biased, up_divisor=8.0)
    check(experts, make_routes(experts, 9))


@gpu
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    experts = make_experts(hidden=384)
    routes = make_routes(experts, 9, dtype=dtype, id_dtype=id_dtype, weight_dtype=dtype)
    check(experts, routes, BOUNDS[dtype], out_dtype=dtype)


@gpu
@pytest.mark.parametrize("hidden", [320, 382, 257, 129])
@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_widths_off_the_block_and_shared_vectors(hidden: int, shared: tuple[bool, bool]) -> None:
    experts = make_experts(hidden=hidden, intermediate=200, shared=shared[0], joint=shared[1])
    check(experts, make_routes(experts, 5), out_dtype=torch.float16)


@gpu
@pytest.mark.parametrize("arithmetic", PRODUCT_ROWS)
@pytest.mark.parametrize("row_columns", [1, 2, 4])
def test_ragged_rows(row_columns: int, arithmetic: str) -> None:
    experts = make_experts(experts=8)
    routes = routes_of_counts(experts, [0, 1, 7, 8, 9, 17, 64, 33])
    check(experts, routes, row_columns=row_columns, arithmetic=arithmetic)


@gpu
@pytest.mark.parametrize("row_columns", [1, 2])
def test_all_tokens_on_one_of_many_experts(row_columns: int) -> None:
    experts = make_experts(experts=896, hidden=128, intermediate=128)
    check(experts, routes_of_counts(experts, [0] * 777 + [40]), row_columns=row_columns)


@gpu
def test_tokens_without_experts_are_zeros() -> None:
    experts = make_experts()
    routes = make_routes(experts, 6)
    ids = routes.ids.clone()
    ids[1], ids[4] = -1, torch.tensor([5, 1 << 40, -(1 << 33)])
    routes = replace(routes, ids=ids)
    found = check(experts, routes)
    assert torch.equal(found[[1, 4]], torch.zeros(2, 256))


@gpu
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_an_expert_map_names_local_experts(map_dtype: torch.dtype, id_dtype: torch.dtype, shared: bool) -> None:
    experts = make_experts(shared=shared)
    local = make_routes(experts, 9, id_dtype=id_dtype)
    # global ids 0 to 11; 3 and 8 are other ranks', 5 names an expert that is not there
    chart = torch.tensor([4, 1, 0, -1, 2, 5, 3, 4, -1, 0, 1, 2], dtype=map_dtype)
    ids = torch.randint(-1, 13, local.ids.shape, generator=torch.Generator().manual_seed(9)).to(id_dtype)
    ids[0] = torch.tensor([3, 5, 12], dtype=id_dtype)  # a token without experts here
    known = (ids >= 0) & (ids < 12)
    named = torch.where(known, chart[ids.clamp(0, 11).long()].to(id_dtype), -1)
    key = make_key(experts, local)
    launch = Launch(experts, key, 9)
    found = launch(replace(local, ids=ids), expert_map=chart.cuda())
    assert torch.equal(found, launch(replace(local, ids=torch.where(named < 5, named, -1))))
    assert torch.equal(found[0], torch.zeros(256))
    assert error(found, expected(experts, replace(local, ids=named))) <= 5e-4


DIRECT = {"direct": True, "row_columns": 1, "up": Tiling(split=2), "down": Tiling()}
RINGS = {
    "direct": True, "row_columns": 1, "up": Tiling(slices=3, stages=3, in_shared=True, most=1),
    "down": Tiling(slices=1, stages=2, resident=4, in_shared=True),
}  # fmt: skip


@gpu
@pytest.mark.parametrize("changes", [DIRECT, RINGS], ids=["split", "rings"])
@pytest.mark.parametrize(
    ("codebook", "rates", "arithmetic"),
    [
        ("mul1", ["3", "1.5", "8"], "exact"),
        ("mul1", ["3", "3.5", "4"], "bytes"),
        ("mul1", ["3", "2.5", "4"], "unrounded"),
        ("mcg", ["4", "3", "5"], "exact"),
        ("mcg", ["4", "3", "5"], "unrounded"),
        ("lut_e4m3", ["2", "4", "3"], "exact"),
    ],
    ids=str,
)
def test_direct_layers(codebook: str, rates: list[str], arithmetic: str, changes: dict) -> None:
    experts = make_experts(codebook=codebook, rates=rates, hidden=600, intermediate=640, biased=True)
    check(experts, make_routes(experts, 3, 4), 6e-4, arithmetic=arithmetic, **changes)


@gpu
@pytest.mark.parametrize("arithmetic", PRODUCT_ROWS)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_direct_routes_without_experts_and_maps(arithmetic: str, shared: bool) -> None:
    experts = make_experts(shared=shared, activation=Activation("relu2"))
    routes = make_routes(experts, 4, 3)
    ids = routes.ids.clone()
    ids[1], ids[2] = -1, torch.tensor([5, 2, 2])
    key = make_key(experts, routes, arithmetic=arithmetic, **DIRECT)
    launch = Launch(experts, key, 4)
    found = launch(replace(routes, ids=ids))
    assert error(found, expected(experts, replace(routes, ids=ids))) <= 6e-4
    assert torch.equal(found[1], torch.zeros(256))
    chart = torch.tensor([-1, 3, 0, 1, 2, 4], dtype=torch.int64)
    local = torch.where((ids >= 0) & (ids < 6), chart[ids.clamp(0, 5)], -1)
    mapped = launch(replace(routes, ids=ids), expert_map=chart.cuda())
    assert torch.equal(mapped, launch(replace(routes, ids=local)))


@gpu
@pytest.mark.parametrize("arithmetic", PRODUCT_ROWS)
def test_a_direct_row_has_the_same_bits_everywhere(arithmetic: str) -> None:
    experts = make_experts(experts=8, hidden=512, intermediate=384)
    routes = make_routes(experts, 6, 8)
    launch = Launch(experts, make_key(experts, routes, arithmetic=arithmetic, **DIRECT), 6)
    first = launch(routes)
    for _ in range(100):
        assert torch.equal(launch(routes), first)
    for token in range(6):
        assert torch.equal(launch(routes.part([token])), first[[token]])


@gpu
@pytest.mark.parametrize(
    ("up", "down"),
    [
        (Tiling(split=3), Tiling(split=2)),
        (Tiling(blocks=3, slices=1, stages=3), Tiling(blocks=2, slices=2, stages=1)),
        (Tiling(blocks=3, slices=1, split=4, resident=1), Tiling(blocks=3, slices=4, split=3)),
        (Tiling(slices=4, resident=1, stages=1), Tiling(slices=8, resident=1)),
    ],
)
@pytest.mark.parametrize("arithmetic", PRODUCT_ROWS)
def test_tilings(up: Tiling, down: Tiling, arithmetic: str) -> None:
    experts = make_experts(experts=4, hidden=768, intermediate=384, rates=["3", "2"])
    routes = make_routes(experts, 21)
    for row_columns in (1, 2):
        check(experts, routes, up=up, down=down, row_columns=row_columns, arithmetic=arithmetic)


@gpu
def test_bytes_of_a_gateless_layer_with_shared_vectors() -> None:
    experts = make_experts(hidden=320, intermediate=1408, shared=True, activation=Activation("relu2"), biased=True)
    check(experts, make_routes(experts, 11, dtype=torch.bfloat16), 4e-3, arithmetic="bytes", row_columns=2)


@gpu
@pytest.mark.parametrize("arithmetic", PRODUCT_ROWS)
def test_same_bits_over_runs_places_and_neighbours(arithmetic: str) -> None:
    experts = make_experts(experts=4, hidden=512, intermediate=256)
    routes = make_routes(experts, 40, 2)
    tilings = {"up": Tiling(split=2), "down": Tiling(split=2)}
    key = make_key(experts, routes, row_columns=2, arithmetic=arithmetic, **tilings)
    launch = Launch(experts, key, 40)
    first = launch(routes)
    for _ in range(100):
        assert torch.equal(launch(routes), first)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert torch.equal(launch(routes.part(order)), first[order])
    for token in (0, 17, 39):
        assert torch.equal(launch(routes.part([token])), first[[token]])


@gpu
def test_graph_replay_follows_its_inputs() -> None:
    experts = make_experts(experts=6)
    batches = [make_routes(experts, 12, seed=seed) for seed in range(4)]
    key = make_key(experts, batches[0], out_dtype=torch.float16)
    launch = Launch(experts, key, 12)
    eager = [launch(batch) for batch in batches]
    x, ids, weights = (tensor.cuda() for tensor in (batches[0].x, batches[0].ids, batches[0].weights))
    out = torch.full((12, 256), float("nan"), dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.launch(x, ids, weights, out)
        launch.launch(x, ids, weights, out)
    for batch, wanted in zip(batches, eager, strict=True):
        for target, source in zip((x, ids, weights), (batch.x, batch.ids, batch.weights), strict=True):
            target.copy_(source)
        launch.scratch.fill_(0xFF)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), wanted)


@gpu
def test_golden_layers(moe_case: MoeCase) -> None:
    with open_checkpoint(moe_case.checkpoint) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, moe_case.layer))
        experts = prepare(source, weights)
    routes = Routes(*(torch.from_numpy(array) for array in (moe_case.x, moe_case.topk_ids, moe_case.topk_weights)))
    check(experts, routes)
    if moe_case.y is not None:
        key = make_key(experts, routes)
        found = Launch(experts, key, routes.x.shape[0])(routes)
        assert error(found, torch.from_numpy(moe_case.y).double()) <= 3e-3
