"""Holds the float64 reference to explicit matrices, to itself over shares, and to the peer's outputs."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_set import DataSet, LinearCase, MoeCase
from exl3_files import random_layer, random_linear, write_checkpoint
from trellis_format.activations import Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.codebooks import get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.extent import TrellisExtent
from trellis_format.rates import Rate
from trellis_format.reference import linear, moe_forward, reconstruct
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_format.tiles import decode_inner

LINEAR_BOUND = 1e-3  # the peer rounds activations, products and outputs to fp16
MOE_BOUND = 2e-3
FLOAT64_BOUND = 1e-6  # ids and weights of the stored outputs went through fp16, nothing else did


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def hadamard_matrix(channels: int) -> np.ndarray:
    block = np.array([[1.0]])
    while len(block) < 128:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(channels // 128), block / np.sqrt(128))


def test_linear_matches_the_peer(linear_case: LinearCase) -> None:
    case = linear_case
    y = linear(case.x, case.trellis, case.suh, case.svh, case.codebook, Rate.of(case.bits))
    assert distance(y, case.y.astype(np.float64)) < LINEAR_BOUND


def test_experts_match_the_peer(moe_case: MoeCase) -> None:
    with open_checkpoint(moe_case.checkpoint) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, moe_case.layer))
        y = moe_forward(source, weights, moe_case.x, moe_case.topk_ids, moe_case.topk_weights)
    assert moe_case.y is not None or moe_case.y_float64 is not None
    if moe_case.y is not None:
        assert distance(y, moe_case.y.astype(np.float64)) < MOE_BOUND
    if moe_case.y_float64 is not None:
        assert distance(y, moe_case.y_float64) < FLOAT64_BOUND


def test_outputs_are_there_for_every_checkpoint(data_set: DataSet) -> None:
    assert {case.checkpoint.name for case in data_set.moe_cases.values()} == set(data_set.checkpoints)
    codebooks = {source.codebook for source in data_set.linear_cases.values()}
    codebooks |= {name.rpartition("_")[2] for name in data_set.checkpoints}
    assert codebooks >= {"3inst", "mcg", "mul1"}


@pytest.mark.parametrize(("codebook", "bits"), [("3inst", 4), ("mcg", 3), ("mul1", 2.5), ("mul1", 8)])
def test_a_linear_is_its_matrix(codebook: str, bits: float) -> None:
    rng = np.random.default_rng(3)
    tensors: dict[str, Any] = random_linear(rng, "p", 256, 384, bits=bits, codebook=codebook)
    parts = tensors["p.trellis"], tensors["p.suh"], tensors["p.svh"], codebook, Rate.of(bits)
    inner = decode_inner(tensors["p.trellis"], get_codebook(codebook), Rate.of(bits)).astype(np.float64)
    suh, svh = (tensors[f"p.{name}"].astype(np.float64) for name in ("suh", "svh"))
    weight = np.diag(suh) @ hadamard_matrix(256) @ inner @ hadamard_matrix(384) @ np.diag(svh)
    np.testing.assert_allclose(reconstruct(*parts), weight, rtol=0, atol=1e-11)
    x, bias = rng.normal(size=(5, 256)), rng.normal(size=384).astype(np.float16)
    np.testing.assert_allclose(linear(x, *parts), x @ weight, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(linear(x, *parts, bias), x @ weight + bias.astype(np.float64), rtol=1e-10, atol=1e-9)


def test_swapping_the_vectors_gives_something_else() -> None:
    tensors: dict[str, Any] = random_linear(np.random.default_rng(3), "p", 128, 128)
    trellis, suh, svh = (tensors[f"p.{name}"] for name in ("trellis", "suh", "svh"))
    right = reconstruct(trellis, suh, svh, "mcg", Rate.of(3))
    assert distance(reconstruct(trellis, svh, suh, "mcg", Rate.of(3)), right) > 0.1


def layer(folder: Path, config: Any = None, **options: Any) -> tuple[TrellisSource, TrellisWeights, dict[str, Any]]:
    tensors = random_layer(np.random.default_rng(5), experts=3, hidden=256, intermediate=384, **options)
    path = write_checkpoint(folder / "c", tensors, config=config or {"hidden_act": "silu"})
    return *trellis_from_exl3(find_layer(open_checkpoint(path), 0)), tensors


def routes(tokens: int, hidden: int = 256, experts: int = 3, top_k: int = 2) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]) if tokens else np.zeros((0, top_k), int)
    return rng.normal(size=(tokens, hidden)), ids, rng.uniform(0.1, 1, (tokens, top_k))


def slow_forward(tensors: dict[str, Any], bits: Any, x: np.ndarray, ids: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Token by token, with matrices in the original basis and silu."""
    y = np.zeros_like(x)
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row):
            weight = {}
            for word in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.0.mlp.experts.{expert}.{word}"
                rate = Rate.of(bits(expert, word))
                parts = (tensors[f"{name}.{part}"] for part in ("trellis", "suh", "svh"))
                bias = tensors.get(f"{name}.bias", np.zeros(1, np.float16)).astype(np.float64)
                weight[word] = reconstruct(*parts, "mul1", rate), bias
            gate, up = (x[token] @ weight[word][0] + weight[word][1] for word in ("gate_proj", "up_proj"))
            hidden = gate / (1 + np.exp(-gate)) * up
            y[token] += shares[token, slot] * (hidden @ weight["down_proj"][0] + weight["down_proj"][1])
    return y


@pytest.mark.parametrize("bias", [None, np.float16])
def test_a_layer_is_its_experts_one_by_one(tmp_path: Path, bias: type | None) -> None:
    def bits(expert: int, word: str) -> float:
        return 1 + expert * 0.5 + (word == "down_proj") * 0.5

    source, weights, tensors = layer(tmp_path, codebook="mul1", bits=bits, bias=bias)
    x, ids, shares = routes(4)
    expected = slow_forward(tensors, bits, x, ids, shares)
    assert distance(moe_forward(source, weights, x, ids, shares), expected) < 1e-12


def test_a_token_routed_twice_to_one_expert_counts_twice(tmp_path: Path) -> None:
    source, weights, _ = layer(tmp_path)
    x = np.random.default_rng(0).normal(size=(1, 256))
    twice = moe_forward(source, weights, x, np.array([[1, 1]]), np.array([[0.25, 0.5]]))
    once = moe_forward(source, weights, x, np.array([[1]]), np.array([[0.75]]))
    np.testing.assert_allclose(twice, once, rtol=1e-12)


def test_ids_outside_the_experts_are_no_experts(tmp_path: Path) -> None:
    source, weights, _ = layer(tmp_path)
    x, ids, shares = routes(3)
    masked = ids.copy()
    masked[:, 1] = [-1, 3, 2**40]
    expected = moe_forward(source, weights, x, ids[:, :1], shares[:, :1])
    assert np.array_equal(moe_forward(source, weights, x, masked, shares), expected)
    assert not moe_forward(source, weights, x, np.full((3, 2), -1), shares).any()


def test_rows_follow_their_tokens_and_grow_with_their_shares(tmp_path: Path) -> None:
    source, weights, _ = layer(tmp_path)
    x, ids, shares = routes(5)
    whole = moe_forward(source, weights, x, ids, shares)
    order = np.array([3, 0, 4, 1, 2])
    assert distance(moe_forward(source, weights, x[order], ids[order], shares[order]), whole[order]) < 1e-14
    assert distance(moe_forward(source, weights, x, ids[:, ::-1], shares[:, ::-1]), whole) < 1e-14
    assert distance(moe_forward(source, weights, x, ids, 4 * shares), 4 * whole) < 1e-14


def test_no_tokens_give_no_rows(tmp_path: Path) -> None:
    source, weights, _ = layer(tmp_path)
    assert moe_forward(source, weights, *routes(0)).shape == (0, 256)


SHARES = st.lists(st.integers(0, 3), max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
@given(cuts=SHARES)
def test_shares_of_the_intermediate_axis_add_up(tmp_path: Path, cuts: list[int]) -> None:
    source, weights, _ = layer(tmp_path, bias=np.float16)
    x, ids, shares = routes(3)
    whole = moe_forward(source, weights, x, ids, shares)
    ends = [0, *sorted(cuts), 3]
    total = np.zeros_like(whole)
    for low, high in itertools.pairwise(ends):
        extent = TrellisExtent(global_intermediate_size=384, first_slot=4 * low, slot_count=4 * (high - low))
        part = moe_forward(source, weights, x, ids, shares, extent=extent)
        if low or high > low:
            total += part
    assert distance(total, whole) < 1e-12


def test_weights_of_a_share_give_the_share(tmp_path: Path) -> None:
    source, weights, tensors = layer(tmp_path)
    extent = TrellisExtent(global_intermediate_size=384, first_slot=4, slot_count=8)
    part = dataclasses.replace(weights, intermediate_scales=weights.intermediate_scales[:, :, extent.channels])
    for expert in range(3):
        for word in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.{expert}.{word}.trellis"
            tiles = tensors[name]
            tensors[name] = tiles[extent.tiles] if word == "down_proj" else tiles[:, extent.tiles]
    held = write_shares(tmp_path, tensors, part)
    narrowed = dataclasses.replace(source, extent=extent)
    x, ids, shares = routes(3)
    expected = moe_forward(source, weights, x, ids, shares, extent=extent)
    np.testing.assert_allclose(moe_forward(narrowed, held, x, ids, shares), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(FormatValueError, match=r"channels 0\.\.384 is not inside the held 128\.\.384"):
        moe_forward(narrowed, held, x, ids, shares, extent=TrellisExtent.whole(384))


def write_shares(folder: Path, tensors: dict[str, Any], weights: TrellisWeights) -> TrellisWeights:
    codes = {name: value for name, value in tensors.items() if name.endswith(".trellis")}
    opened = open_checkpoint(write_checkpoint(folder / "share", codes)).tensors
    names = [
        [f"model.layers.0.mlp.experts.{expert}.{word}.trellis" for word in ("gate_proj", "up_proj", "down_proj")]
        for expert in range(3)
    ]
    return dataclasses.replace(weights, codes=tuple(tuple(opened[name] for name in row) for row in names))


def test_padded_channels_change_nothing(tmp_path: Path) -> None:
    config = {"hidden_act": "silu", "hidden_size": 200, "moe_intermediate_size": 300}
    source, weights, _ = layer(tmp_path, config)
    x, ids, shares = routes(3, hidden=200)
    y = moe_forward(source, weights, x, ids, shares)
    assert y.shape == (3, 200)
    wide = dataclasses.replace(source, geometry=dataclasses.replace(source.geometry, hidden_size=256))
    padded = np.concatenate([x, np.zeros((3, 56))], axis=1)
    assert np.array_equal(moe_forward(wide, weights, padded, ids, shares)[:, :200], y)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    source, weights, tensors = layer(tmp_path, {"mlp_hidden_act": "relu2"}, words=("up_proj", "down_proj"))
    assert source.geometry.projections == (Projection.UP, Projection.DOWN)
    x, _, _ = routes(2)
    up, down = (
        reconstruct(
            *(tensors[f"model.layers.0.mlp.experts.1.{w}.{p}"] for p in ("trellis", "suh", "svh")), "mcg", Rate.of(3)
        )
        for w in ("up_proj", "down_proj")
    )
    expected = np.maximum(x @ up, 0) ** 2 @ down
    found = moe_forward(source, weights, x, np.ones((2, 1), int), np.ones((2, 1)))
    assert distance(found, expected) < 1e-12


def test_an_activation_must_be_known(tmp_path: Path) -> None:
    source, weights, _ = layer(tmp_path, {"hidden_act": "unheard_of"})
    with pytest.raises(FormatValueError, match="names no known activation; give one"):
        moe_forward(source, weights, *routes(2))
    given_one = moe_forward(source, weights, *routes(2), activation=Activation("silu"))
    stated = moe_forward(dataclasses.replace(source, activation=Activation("silu")), weights, *routes(2))
    assert np.array_equal(given_one, stated)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, ids, shares: (x[:, :255], ids, shares), r"x must be \[tokens, 256\], got shape \(3, 255\)"),
        (lambda x, ids, shares: (x[0], ids, shares), r"x must be \[tokens, 256\], got shape \(256,\)"),
        (lambda x, ids, shares: (x, ids[:2], shares[:2]), r"must both be \[3, top_k\]"),
        (lambda x, ids, shares: (x, ids, shares[:, :1]), r"ids \(3, 2\) and weights \(3, 1\)"),
        (lambda x, ids, shares: (x, ids[:, 0], shares[:, 0]), r"must both be \[3, top_k\]"),
    ],
)
def test_shapes_must_fit(tmp_path: Path, change: Any, text: str) -> None:
    source, weights, _ = layer(tmp_path)
    with pytest.raises(FormatValueError, match=text):
        moe_forward(source, weights, *change(*routes(3)))


def test_shares_must_fit(tmp_path: Path) -> None:
    source, weights, _ = layer(tmp_path)
    for size, first, count, text in (
        (512, 0, 4, "axis of 512 channels, the layer has 384"),
        (384, 2, 4, "cuts a Hadamard block"),
    ):
        extent = TrellisExtent(global_intermediate_size=size, first_slot=first, slot_count=count)
        with pytest.raises(FormatValueError, match=text):
            moe_forward(source, weights, *routes(1), extent=extent)
