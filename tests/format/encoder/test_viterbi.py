"""Holds the search for states to closed rings, to the published error at each rate, and to an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.codebooks import CODEBOOKS
from trellis_format.encoder.viterbi import encode_tiles
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import TILE_WEIGHTS, Rate
from trellis_format.ring import chain_holds, pack_states, unpack_states

PAIRS = [(codebook.name, rate) for codebook in CODEBOOKS.values() for rate in codebook.legal_rates]

# Mean squared error of a good encoder on normal values of variance 1, by K and codebook.
FIGURES = [
    (1.5, "mul1", 0.126),
    (2, "3inst", 0.075),
    (2.5, "mul1", 0.033),
    (3, "mcg", 0.017),
    (3.5, "mul1", 0.0084),
    (4, "mul1", 0.0047),
]
TOLERANCE = 1.15  # a mean over 3,072 values has a standard deviation of about 3%, the figures have two digits


def error(values: np.ndarray, codebook: str, rate: Rate) -> float:
    law = CODEBOOKS[codebook]
    spread = law.table_for(rate).astype(np.float64).std()
    states = encode_tiles(values * spread, law, rate)
    return float(np.mean((law.decode(states, rate).astype(np.float64) / spread - values) ** 2))


@pytest.mark.parametrize(("bits", "codebook", "figure"), FIGURES)
def test_error_on_normal_values_is_that_of_a_good_encoder(bits: float, codebook: str, figure: float) -> None:
    values = np.random.default_rng(11).normal(size=(12, TILE_WEIGHTS))
    found = error(values / values.std(), codebook, Rate.of(bits))
    assert 2.0 ** (-2 * bits) < found < TOLERANCE * figure  # no code beats the rate-distortion bound


@pytest.mark.parametrize(("codebook", "rate"), PAIRS, ids=[f"{name}-{rate}" for name, rate in PAIRS])
def test_every_pair_gives_closed_rings_that_follow_the_values(codebook: str, rate: Rate) -> None:
    values = np.random.default_rng(rate.half_bits).normal(size=(1, TILE_WEIGHTS))
    law = CODEBOOKS[codebook]
    spread = law.table_for(rate).astype(np.float64).std()
    states = encode_tiles(values * spread, law, rate)
    assert chain_holds(states, rate)
    assert np.array_equal(unpack_states(pack_states(states, rate), rate), states)
    left = np.mean((law.decode(states, rate).astype(np.float64) / spread - values) ** 2)
    assert left < max(1.35 * 2.0 ** (-2 * rate.bits), 0.005)  # past 4 bits, values beyond the codebook decide


@pytest.mark.parametrize("bits", [1, 2.5, 4, 8])
def test_values_of_a_ring_are_found_again(bits: float) -> None:
    rate, law = Rate.of(bits), CODEBOOKS["mul1"]
    words = np.random.default_rng(3).integers(-(2**15), 2**15, (3, rate.tile_words16), dtype=np.int16)
    states = unpack_states(words, rate)
    values = law.decode(states).astype(np.float64)
    found = law.decode(encode_tiles(values, law, rate)).astype(np.float64)
    assert np.array_equal(found, values)  # distance 0 is the optimum, and the ring is there to be found


def test_tiles_are_encoded_one_by_one() -> None:
    values = np.random.default_rng(4).normal(size=(5, TILE_WEIGHTS))
    rate, law = Rate.of(6), CODEBOOKS["mcg"]
    together = encode_tiles(values, law, rate)
    for tile in range(5):
        assert np.array_equal(encode_tiles(values[tile : tile + 1], law, rate)[0], together[tile])


def test_no_single_symbol_can_be_changed_for_the_better() -> None:
    """Every ring that differs in the bits of one position is at least as far, at the rate whose rings are shortest."""
    values = np.random.default_rng(5).normal(size=(1, TILE_WEIGHTS))
    rate, law = Rate.of(8), CODEBOOKS["mul1"]
    states = encode_tiles(values, law, rate)
    best = np.sum((law.decode(states).astype(np.float64) - values) ** 2)
    table = law.table.astype(np.float64)
    for position in range(TILE_WEIGHTS):
        following = (position + 1) % TILE_WEIGHTS
        symbols = np.arange(256, dtype=np.uint16)
        here = states[0, position] & np.uint16(0xFF00) | symbols
        after = states[0, following] & np.uint16(0x00FF) | symbols << np.uint16(8)
        old = sum((table[states[0, place]] - values[0, place]) ** 2 for place in (position, following))
        changed = best - old + (table[here] - values[0, position]) ** 2 + (table[after] - values[0, following]) ** 2
        assert changed.min() >= best - 1e-4  # costs are summed in float32


def test_no_tiles_are_no_states() -> None:
    assert encode_tiles(np.zeros((0, TILE_WEIGHTS)), CODEBOOKS["mcg"], Rate.of(3)).shape == (0, TILE_WEIGHTS)


def test_integers_are_refused() -> None:
    with pytest.raises(FormatTypeError, match="must be floating, got int64"):
        encode_tiles(np.zeros((1, TILE_WEIGHTS), dtype=np.int64), CODEBOOKS["mcg"], Rate.of(3))


@pytest.mark.parametrize("shape", [(TILE_WEIGHTS,), (1, 255), (1, 1, TILE_WEIGHTS)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatValueError, match=r"must be \[tiles, 256\], got shape"):
        encode_tiles(np.zeros(shape), CODEBOOKS["mcg"], Rate.of(3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    values = np.zeros((2, TILE_WEIGHTS))
    values[1, 7] = value
    with pytest.raises(FormatValueError, match=f"tile 1 has {value} at 7"):
        encode_tiles(values, CODEBOOKS["mcg"], Rate.of(3))


def test_rates_that_the_codebook_lacks_are_refused() -> None:
    with pytest.raises(FormatValueError, match=r"codebook mcg has no half rate K = 2\.5"):
        encode_tiles(np.zeros((1, TILE_WEIGHTS)), CODEBOOKS["mcg"], Rate.of(2.5))
