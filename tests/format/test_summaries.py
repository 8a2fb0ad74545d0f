"""Holds the numbers of a report to arithmetic done another way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, random_linear, write_checkpoint
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3.layers import find_layers, group_modules
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.report import BitsPerWeight
from trellis_format.summaries import (
    add_bits,
    bits_by_class,
    bits_per_weight,
    summarise_projections,
    summarise_transforms,
    tensor_parallel,
)
from trellis_format.survey import TensorClass

RNG = np.random.default_rng(0)


def described(folder: Path, tensors: dict[str, Any]) -> dict[str, Exl3Linear]:
    opened = open_checkpoint(write_checkpoint(folder / "c", tensors))
    return {name: describe_linear(name, parts) for name, parts in group_modules(opened.tensors).linears.items()}


def test_bits_are_those_of_the_bytes(tmp_path: Path) -> None:
    tensors = random_linear(RNG, "a", 256, 128, bits=2.5, codebook="mul1", bias=np.float32) | random_linear(
        RNG, "b", 128, 384, bits=8, codebook="3inst"
    )
    bits = bits_per_weight(described(tmp_path, tensors).values())
    weights = 256 * 128 + 128 * 384
    assert (bits.linears, bits.weights) == (2, weights)
    assert bits.codes == pytest.approx((256 * 128 * 2.5 + 128 * 384 * 8) / weights)
    assert bits.total == pytest.approx(8 * sum(np.asarray(value).nbytes for value in tensors.values()) / weights)


def test_vectors_cost_16_bits_a_channel(tmp_path: Path) -> None:
    bits = bits_per_weight(described(tmp_path, random_linear(RNG, "a", 512, 256, codebook="3inst")).values())
    assert bits.codes == 3.0
    assert bits.total == pytest.approx(3.0 + 16 * (512 + 256) / (512 * 256))


def test_nothing_has_no_bits() -> None:
    bits = bits_per_weight([])
    assert (bits.linears, bits.weights, bits.codes, bits.total) == (0, 0, None, None)


def test_classes_are_counted_apart_and_together(tmp_path: Path) -> None:
    tensors = {}
    for name, rate in (("a", 1), ("b", 2), ("c", 4), ("d", 8), ("e", 6)):
        tensors |= random_linear(RNG, name, 128, 128, bits=rate)
    kinds = {
        "a": TensorClass.EXPERTS,
        "b": TensorClass.EXPERTS,
        "c": TensorClass.SHARED_EXPERTS,
        "d": TensorClass.LINEARS,
        "e": TensorClass.HEAD,
    }
    bits = bits_by_class(described(tmp_path, tensors), kinds)
    found = {name: getattr(bits, name).codes for name in ("model", "experts", "shared_experts", "linears", "head")}
    assert found == {"model": 4.2, "experts": 1.5, "shared_experts": 4.0, "linears": 8.0, "head": 6.0}
    assert (bits.model.linears, bits.experts.linears) == (5, 2)


def test_projections_are_counted_by_what_their_experts_have(tmp_path: Path) -> None:
    tensors = random_layer(
        RNG, experts=3, codebook="mul1", bits=lambda e, word: 2.5 if (e, word) == (1, "up_proj") else 3
    )
    tensors |= random_linear(RNG, "model.layers.0.mlp.experts.2.down_proj", 256, 128, codebook="mcg", bias=np.float16)
    del tensors["model.layers.0.mlp.experts.2.down_proj.mul1"]
    linears = described(tmp_path, tensors)
    (names,) = find_layers(open_checkpoint(tmp_path / "c")).values()
    gate, up, down = summarise_projections(names, linears)
    assert [part.projection for part in (gate, up, down)] == ["gate", "up", "down"]
    assert (gate.rates, up.rates, down.rates) == ({"3": 3}, {"2.5": 1, "3": 2}, {"3": 3})
    assert (gate.codebooks, down.codebooks) == ({"mul1": 3}, {"mcg": 1, "mul1": 2})
    assert (gate.shapes, down.shapes) == ({"128 x 256": 3}, {"256 x 128": 3})
    assert (gate.biased, down.biased) == (0, 1)
    for part, word in ((gate, ".gate_proj."), (up, ".up_proj."), (down, ".down_proj.")):
        assert part.bytes == sum(np.asarray(value).nbytes for name, value in tensors.items() if word in name)


def test_broken_linears_are_not_counted(tmp_path: Path) -> None:
    linears = described(tmp_path, random_layer(RNG, words=("up_proj", "down_proj")))
    (names,) = find_layers(open_checkpoint(tmp_path / "c")).values()
    del linears["model.layers.0.mlp.experts.1.up_proj"]
    up, down = summarise_projections(names, linears)
    assert (up.rates, down.rates) == ({"3": 1}, {"3": 2})
    assert summarise_projections(names, {})[0].rates == {}


@pytest.mark.parametrize(
    ("channels", "blocks", "even"),
    [
        (128, 1, (1,)),
        (768, 6, (1, 2, 3, 6)),
        (1408, 11, (1, 11)),
        (2048, 16, (1, 2, 4, 8, 16)),
        (3072, 24, (1, 2, 3, 4, 6, 8, 12, 24)),
    ],
)
def test_ranks_that_divide_the_blocks(channels: int, blocks: int, even: tuple[int, ...]) -> None:
    parallel = tensor_parallel(channels)
    assert (parallel.blocks, parallel.even, parallel.largest) == (blocks, even, blocks)
    assert all(channels % (128 * world) == 0 for world in parallel.even)


@pytest.mark.parametrize("grain", [1, 4, 8, 12])
@pytest.mark.parametrize("barriers", [(), (12,), (8, 16), (6,), (16, 40)])
@pytest.mark.parametrize("slots", [24, 48, 20, 6])
def test_cuts_respect_alignment_and_barriers(slots: int, grain: int, barriers: tuple[int, ...]) -> None:
    """Against a search over world sizes: every share in whole blocks and units, no barrier inside one."""
    unit = math.lcm(grain, 4)
    expected = []
    for world in range(1, slots + 1):
        share = slots / world
        cuts = [(rank * share, (rank + 1) * share) for rank in range(world)]
        whole = all(end % unit == 0 for _, end in cuts)
        if whole and not any(first < barrier < end for barrier in barriers for first, end in cuts):
            expected.append(world)
    parallel = tensor_parallel(slots * 32, alignment_slots=grain, barriers=barriers)
    assert parallel.even == tuple(expected)
    assert parallel.largest == max(expected, default=0)
    assert (parallel.alignment_slots, parallel.barriers) == (unit, barriers)


def test_bits_of_several_parts_add_up() -> None:
    empty = BitsPerWeight(linears=0, weights=0, codes=None, total=None)
    three = BitsPerWeight(linears=2, weights=100, codes=3.0, total=3.5)
    five = BitsPerWeight(linears=1, weights=300, codes=5.0, total=5.1)
    unknown = BitsPerWeight(linears=1, weights=100, codes=None, total=4.0)
    assert add_bits() == add_bits(empty, empty) == empty
    assert add_bits(three, empty) == three
    both = add_bits(three, five)
    assert (both.linears, both.weights) == (3, 400)
    assert both.codes == pytest.approx((3 * 100 + 5 * 300) / 400)
    assert both.total == pytest.approx((3.5 * 100 + 5.1 * 300) / 400)
    assert add_bits(three, unknown).codes is None
    assert add_bits(three, unknown).total == pytest.approx(3.75)


def test_forms_of_vectors_are_counted(tmp_path: Path) -> None:
    tensors = random_linear(RNG, "a", 128, 128) | random_linear(RNG, "b", 128, 128, packed=True)
    tensors |= random_linear(RNG, "c", 128, 128)
    transforms = summarise_transforms(described(tmp_path, tensors).values())
    assert (transforms.kind, transforms.block_size) == ("scaled_hadamard", 128)
    assert (transforms.linears_with_vectors, transforms.linears_with_packed_signs) == (2, 1)
