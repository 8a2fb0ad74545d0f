"""Holds shares of any world size to be slices of the whole, in bytes and in float64 outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.samples import Layer, expected_tiles, linears, random_layer, random_tokens, weights_of
from slot_files import random_content, random_linears
from trellis_format.activations import Activation
from trellis_format.container.writer import write_content, write_manifest
from trellis_format.layer_source import open_layer_source
from trellis_format.reference import moe_forward
from trellis_format.signs import SignAxis, pattern_signs
from trellis_prep import (
    RankGrid,
    TrellisStaging,
    balanced_extents,
    even_extents,
    expert_map,
    expert_ranges,
    partition_extents,
    prepare,
    select_experts,
)

KINDS = {
    "mixed": {"experts": 3},
    "no gate": {"experts": 4, "gated": False, "rates": ("1", "3.5", "6")},
    "biased": {"experts": 2, "biased": True, "codebook": "mcg", "rates": ("2", "5")},
    "shared": {"experts": 1, "shared": True, "joint": True, "rates": ("1.5",)},
}


def layer_of(kind: str, blocks: int, hidden: int = 128) -> Layer:
    return random_layer(**({"hidden": hidden, "intermediate": blocks * 128} | KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", range(1, 10))
def test_outputs_of_ranks_sum_to_the_unsplit_layer(kind: str, world: int) -> None:
    layer = layer_of(kind, blocks=9)
    tokens = random_tokens(layer[0], tokens=3)
    expected = moe_forward(*layer, *tokens)
    total = np.zeros_like(expected)
    for extent in even_extents(9 * 128, world):
        prepared = prepare(*layer, extent=extent)
        part = moe_forward(*weights_of(prepared), *tokens)
        np.testing.assert_array_equal(part, moe_forward(*layer, *tokens, extent=extent))
        total += part
    assert np.linalg.norm(total - expected) <= 1e-12 * np.linalg.norm(expected)


@settings(max_examples=25)
@given(st.data())
def test_prepared_bytes_of_any_planner_are_slices_of_the_whole(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    planner = data.draw(st.sampled_from(["even", "partition", "balanced"]))
    half = data.draw(st.integers(1, 4))
    blocks = 2 * half
    world = data.draw(st.integers(2 if planner != "even" else 1, blocks))
    extents = {
        "even": lambda: even_extents(blocks * 128, world),
        "partition": lambda: partition_extents(blocks * 128, world, barriers=[half * 4]),
        "balanced": lambda: balanced_extents(blocks * 128, world, layer=data.draw(st.integers(0, 5))),
    }[planner]()
    layer = layer_of(kind, blocks)
    largest = max(layer[0].expert_code_bytes(expert) for expert in range(layer[0].geometry.num_experts))
    bounds = TrellisStaging(max_bytes=data.draw(st.integers(largest, 4 * largest)))
    whole = prepare(*layer)
    shares = [prepare(*layer, extent=extent, staging=bounds, poison=True) for extent in extents]
    for expert, projection in linears(layer[0]):
        for share, extent in zip(shares, extents, strict=True):
            tiles = share.tiles(expert, projection)[0].numpy()
            np.testing.assert_array_equal(tiles, expected_tiles(layer, extent, expert, projection))
    middle = [share.intermediate_scales for share in sorted(shares, key=lambda share: share.extent.first_slot)]
    assert torch.equal(torch.cat(middle, dim=-1), whole.intermediate_scales)
    assert sum(share.layout.code_bytes for share in shares) == whole.layout.code_bytes


def halves_under_hadamard(folder: Path) -> list[Layer]:
    """Both halves of a layer under an intermediate Hadamard, from a container: their input vectors differ."""
    content = random_content(experts=3, hidden=512, intermediate=1024, transform=True)
    write_manifest(folder, content.head, {3: write_content(folder, content)})
    return [
        open_layer_source(folder, 3, extent=extent, activation=Activation("silu"))
        for extent in partition_extents(1024, 2, barriers=[16])
    ]


@pytest.mark.parametrize("world", range(2, 9))
def test_ranks_under_an_intermediate_hadamard_sum_to_both_halves(tmp_path: Path, world: int) -> None:
    halves = halves_under_hadamard(tmp_path)
    tokens = random_tokens(halves[0][0], tokens=3)
    expected = sum(moe_forward(*half, *tokens) for half in halves)
    total = np.zeros_like(expected)
    for extent in partition_extents(1024, world, barriers=[16]):
        source, weights = halves[extent.first_slot >= 16]
        prepared = prepare(source, weights, extent=extent, poison=True)
        total += moe_forward(*weights_of(prepared, weights.expert_sign_patterns), *tokens)
    assert np.linalg.norm(total - expected) <= 1e-12 * np.linalg.norm(expected)


@pytest.mark.parametrize("world", range(1, 9))
def test_signs_of_ranks_are_slices_of_the_draw_of_the_whole_axis(world: int) -> None:
    source, weights = random_linears(experts=4, hidden=512, intermediate=1024, transform=True)
    patterns = weights.expert_sign_patterns
    assert patterns is not None
    for extent in even_extents(1024, world):
        prepared = prepare(source, weights, extent=extent)
        for name, axis, per_channel in (("pre", SignAxis.PRE, 2), ("post", SignAxis.POST, 1)):
            whole = np.stack([pattern_signs(pattern, axis, 1024) for pattern in patterns.tolist()])
            share = slice(per_channel * extent.first_channel, per_channel * extent.end_channel)
            np.testing.assert_array_equal(prepared.signs[name].numpy(), whole[:, share])
        assert prepared.layout.table_bytes["signs.pre"] == 4 * 2 * extent.width * 2
        assert prepared.nbytes == prepared.layout.total_bytes


def test_selected_experts_keep_their_signs() -> None:
    layer = random_linears(experts=5, hidden=512, intermediate=256, transform=True)
    whole = prepare(*layer)
    chosen = prepare(*select_experts(*layer, [4, 1]))
    for name in ("pre", "post"):
        assert torch.equal(chosen.signs[name], whole.signs[name][[4, 1]])


def test_grid_of_ranks_sums_to_the_unsplit_layer() -> None:
    layer = random_layer(experts=5, hidden=128, intermediate=384, biased=True)
    x, ids, weights = random_tokens(layer[0], tokens=6, top_k=3)
    expected = moe_forward(*layer, x, ids, weights)
    total = np.zeros_like(expected)
    grid = RankGrid(even_extents(384, 2), expert_ranges(5, 3))
    for rank in range(grid.world_size):
        share = grid.share(rank)
        prepared = prepare(*select_experts(*layer, share.experts), extent=share.extent)
        local = np.where(ids >= 0, expert_map(5, share.experts)[ids], -1)
        total += moe_forward(*weights_of(prepared), x, local, weights)
    assert np.linalg.norm(total - expected) <= 1e-12 * np.linalg.norm(expected)


def test_shares_with_an_empty_one_sum_to_the_unsplit_layer() -> None:
    layer = layer_of("biased", blocks=2)
    tokens = random_tokens(layer[0])
    total = 0
    for extent in even_extents(256, 4, allow_empty=True):
        prepared = prepare(*layer, extent=extent)
        if extent.width:
            total = total + moe_forward(*weights_of(prepared), *tokens)
        else:
            assert prepared.codes.numel() == 0
            assert prepared.biases.keys() == {"gate", "up"}
    expected = moe_forward(*layer, *tokens)
    assert np.linalg.norm(total - expected) <= 1e-12 * np.linalg.norm(expected)
