"""Holds the float64 layer over slot-major codes, and under an intermediate Hadamard, to loops over matrices.

The loops build every matrix from its definition, so that they share no rotation, interleave or layout with the product.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from slot_files import Layer, random_content, random_linears, rows_by_loop
from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.rates import Rate
from trellis_format.reference import moe_forward
from trellis_format.source import CodeLayout
from trellis_format.tiles import decode_inner

SILU = Activation("silu")


def as_rows(layer: Layer) -> Layer:
    source, weights = layer
    codes = MemoryArray(rows_by_loop(layer))
    return (
        dataclasses.replace(source, layout=CodeLayout.SLOT_MAJOR),
        dataclasses.replace(weights, codes=codes),
    )


def routes(experts: int, hidden: int, tokens: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:2] if experts > 1 else np.array([0, -1]) for _ in range(tokens)])
    return rng.normal(size=(tokens, hidden)), ids, rng.uniform(0.1, 1, (tokens, 2))


def sylvester(size: int) -> np.ndarray:
    """The normalised Hadamard matrix, entry by entry."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return np.array(signs) / math.sqrt(size)


def blocks(size: int, block: int) -> np.ndarray:
    """The same along a diagonal."""
    return np.kron(np.eye(size // block), sylvester(block))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_both_layouts_give_the_same_numbers(gated: bool, biased: bool) -> None:
    layer = random_linears(gated=gated, biased=biased)
    x, ids, weights = routes(3, 256)
    for share in (None, TrellisExtent(global_intermediate_size=384, first_slot=4, slot_count=8)):
        straight = moe_forward(*layer, x, ids, weights, extent=share)
        assert np.array_equal(straight, moe_forward(*as_rows(layer), x, ids, weights, extent=share))
        assert np.abs(straight).max() > 0


def inner_by_loop(codes: np.ndarray, hidden: int, expert: int, projection: int) -> np.ndarray:
    """One K = 3 mcg linear of gated experts as a float64 matrix, each tile found by the arithmetic of the layout."""
    tiles, slots = hidden // 16, len(codes)
    grid = np.empty((2 * slots, tiles, 48), dtype=np.int16)
    for channel in range(2 * slots):
        for tile in range(tiles):
            begin = (((expert * 3 + projection) * 2 + channel % 2) * tiles + tile) * 96
            grid[channel, tile] = np.frombuffer(codes[channel // 2, begin : begin + 96].tobytes(), dtype="<i2")
    turned = grid if projection == 2 else grid.transpose(1, 0, 2)
    return decode_inner(turned, get_codebook("mcg"), Rate.of(3)).astype(np.float64)


def test_a_container_gives_the_numbers_of_its_linears() -> None:
    content = random_content(experts=2, hidden=256, intermediate=256)
    codes, h = content.codes.read(), blocks(256, 128)
    x, ids, factors = routes(2, 256)
    y = np.zeros((5, 256))
    for token in range(5):
        for slot in range(2):
            expert = ids[token, slot]
            inner = [inner_by_loop(codes, 256, expert, index) for index in range(3)]
            scales = content.rotations[:, expert].transpose(1, 0, 2).reshape(3, 256).astype(np.float64)
            inputs = [table[expert].astype(np.float64) for table in (content.gate_suh, content.up_suh)]
            gate, up = ((x[token] * inputs[index]) @ h @ inner[index] @ h * scales[index] for index in (0, 1))
            joined = gate / (1 + np.exp(-gate)) * up
            out = (joined * scales[2]) @ h @ inner[2] @ h * content.down_svh[expert].astype(np.float64)
            y[token] += factors[token, slot] * out
    found = moe_forward(*trellis_from_exl3(content, activation=SILU), x, ids, factors)
    np.testing.assert_allclose(found, y, rtol=1e-11, atol=1e-11)


def transformed_by_loop(
    layer: Layer,
    x: np.ndarray,
    ids: np.ndarray,
    factors: np.ndarray,
    first: int,
    width: int,
    signs: dict[str, np.ndarray],
) -> np.ndarray:
    """The forward under an intermediate Hadamard over channels [first, first + width), route by route."""
    source, weights = layer
    hidden, codebook = source.geometry.padded_hidden_size, get_codebook(source.codebook)
    h512, h128, h_mid, h_two = (
        blocks(hidden, 512), blocks(hidden, 128), blocks(width, 128), blocks(2 * width, 128),
    )  # fmt: skip
    total = np.zeros((len(x), hidden))
    for token in range(len(x)):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            inner = []
            for index in range(3):
                tiles = weights.code_view(expert, index).read()
                cut = slice(first // 16, (first + width) // 16)
                part = tiles[cut] if index == 2 else tiles[:, cut]
                inner.append(decode_inner(part, codebook, source.rates.rate(expert, index)).astype(np.float64))
            scale = weights.intermediate_scales[expert, :, first : first + width].astype(np.float64)
            a = (x[token] @ h512 * weights.input_scales[expert, 0].astype(np.float64)) @ h128
            stored = [a @ inner[0], a @ inner[1]]
            window_values, window_scales = [], []
            for begin in range(0, width, 64):
                for half in (begin, begin + 32):
                    for index in (0, 1):
                        window_values += stored[index][half : half + 32].tolist()
                        window_scales += scale[index, half : half + 32].tolist()
            v = (np.array(window_values) @ h_two * np.array(window_scales)) @ h_two
            v = v * signs["pre"][expert, 2 * first : 2 * (first + width)]
            gate, up = v[0::2], v[1::2]
            joined = gate / (1 + np.exp(-gate)) * up * signs["post"][expert, first : first + width]
            down = (joined @ h_mid * scale[2]) @ h_mid @ inner[2]
            total[token] += factors[token, slot] * (down @ h128 * weights.output_scales[expert].astype(np.float64))
    return total @ h512


def draws(patterns: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Signs of whole axes, by the law."""
    found = {}
    for name, axis, length in (("pre", 1, 2 * size), ("post", 2, size)):
        rows = []
        for pattern in patterns.tolist():
            seed = (0x6A09E667F3BCC909 * pattern + 0xBB67AE8584CAA73B * axis) % 2**63 % 2**32
            words = np.random.RandomState(seed).randint(0, 2**32, length, dtype=np.uint32)
            rows.append(2.0 * (words & 1) - 1 if pattern else np.ones(length))
        found[name] = np.array(rows)
    return found


@pytest.mark.parametrize(
    ("codebook", "rates"), [("mcg", (3,)), ("lut_e4m3", (2,)), ("lut_fp16", (5, 6)), ("mul1", (1.5, 4))]
)
def test_an_intermediate_hadamard_is_that_of_the_loop(codebook: str, rates: tuple[float, ...]) -> None:
    layer = random_linears(experts=3, hidden=512, codebook=codebook, rates=rates, transform=True)
    x, ids, factors = routes(3, 512)
    signs = draws(layer[1].expert_sign_patterns, 384)  # type: ignore[arg-type]
    parts = []
    for first, count in ((0, 12), (0, 4), (4, 8)):
        share = TrellisExtent(global_intermediate_size=384, first_slot=first, slot_count=count)
        expected = transformed_by_loop(layer, x, ids, factors, 32 * first, 32 * count, signs)
        for made in (layer, as_rows(layer)):
            found = moe_forward(*made, x, ids, factors, extent=share)
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())
        parts.append(found)
    np.testing.assert_allclose(parts[1] + parts[2], parts[0], rtol=1e-10, atol=1e-10 * np.abs(parts[0]).max())


def test_signs_and_transform_come_together() -> None:
    source, weights = random_linears(hidden=512, codebook="mcg", rates=(3,), transform=True)
    x, ids, factors = routes(3, 512)
    with pytest.raises(FormatValueError, match="expert_sign_patterns come together or not at all"):
        moe_forward(source, dataclasses.replace(weights, expert_sign_patterns=None), x, ids, factors)
    with pytest.raises(FormatValueError, match="expert_sign_patterns come together or not at all"):
        moe_forward(dataclasses.replace(source, expert_transform=None), weights, x, ids, factors)


def test_halves_of_a_container_sum_to_both() -> None:
    rng = np.random.default_rng(0)
    content = random_content(experts=2, hidden=512, intermediate=256, codebook="lut_e4m3", bits=2, transform=True)
    x, ids, factors = rng.normal(size=(3, 512)), np.array([[0, 1], [1, -1], [0, 1]]), rng.uniform(size=(3, 2))
    total, expected = np.zeros((3, 512)), np.zeros((3, 512))
    for half in (0, 1):
        rows = slice(4 * half, 4 * half + 4)
        part = dataclasses.replace(
            content,
            extent=TrellisExtent(global_intermediate_size=256, first_slot=4 * half, slot_count=4),
            codes=MemoryArray(content.codes.read()[rows]),
            rotations=content.rotations[rows],
        )
        source, weights = trellis_from_exl3(part, activation=SILU)
        total += moe_forward(source, weights, x, ids, factors)
        # the same half of a layer whose gate and up share this half's vector
        table = (content.gate_suh, content.up_suh)[half]
        layout = content.head.layout.model_copy(update={"extent_barriers": ()})
        both = dataclasses.replace(part, gate_suh=table, up_suh=table, head=content.head.model_copy(
            update={"layout": layout}))  # fmt: skip
        expected += moe_forward(*trellis_from_exl3(both, activation=SILU), x, ids, factors)
    assert np.array_equal(total, expected)
    assert np.abs(total).max() > 0
