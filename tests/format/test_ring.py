"""Holds the bit ring to a bit-by-bit reading of the rules, to the peer's states, and to published vectors."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_set import StatesCase, sha256
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import chain_holds, pack_states, unpack_states

RATES = pytest.mark.parametrize("rate", ALL_RATES, ids=str)

# First four states of the tile whose 32-bit word i is 0x9E3779B1 * (i + 1), and SHA-256 of its 256 states.
WINDOWS = {
    1: ("9b11 3622 6c44 d889", "6e03dd3d6229398615479a4d4080d2bc18edf3ab92b9abe66f7e789d8955a738"),
    2: ("6c42 b109 c427 109e", "377f89754c0903b6c39efac05359357b3ec53944930bbcf229ed2a394c31c59b"),
    3: ("44c4 2627 313c 89e3", "aff9af7846e149dd86c186e4b9a096b38e87c6303ae59eb3ad380ca95b287daa"),
    4: ("6209 209e 09e3 9e37", "f3cdf2f272251cf6131e8faedef8a5dc4d76e0105f77ca67577e44558ca6f4d4"),
    5: ("7513 a278 4f1b e377", "b14f4d0c3c91ab7242cbbd8224618691efc64247786944c0cde0c5605e289918"),
    6: ("4c27 09e3 78dd 3779", "bc211558842de073fcbf5f85202d99da70ff20275821131e581c85ccd1e48b15"),
    7: ("5c4f 278d c6ef 779b", "786b6a3124094d28b06a34d1772e970e3a1b9e383ea255b779b771842d13a4fa"),
    8: ("409e 9e37 3779 79b1", "84a6e0e728e7dd048d14be7bf6ff0134002ac26be10f51978e9c5ad3cc9e2c79"),
    1.5: ("6899 a264 44c9 1327", "15d6a762a63152a835cd3c544d5fae367ea773ddda0a1a4a3bf5c178529f42d4"),
    2.5: ("0752 3a93 ea4f 5278", "eb5f519b8653f5f42bd78cb27891f70e1156d6d464ed81ff887906f007aac751"),
    3.5: ("7ae4 ae4f 7278 278d", "d767341c95c252271683a2780271a730c8bbdf176629ac4c4c3f154be61c8422"),
}


def slow_states(words: np.ndarray, rate: Rate) -> list[int]:
    """States of one tile, read off one bit at a time."""
    ring: list[int] = []
    for word in words.view(np.uint16).view("<u4").tolist():
        ring += [word >> (31 - bit) & 1 for bit in range(32)]
    states, end = [], 0
    for position in range(256):
        end += int(rate.bits) + (1 if rate.is_half and position % 2 else 0)
        window = [ring[(end - 16 + bit) % len(ring)] for bit in range(16)]
        states.append(int("".join(map(str, window)), 2))
    return states


def random_tiles(rate: Rate, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**15), 2**15, (*shape, rate.tile_words16), dtype=np.int16)


@RATES
def test_states_are_the_windows_of_the_ring(rate: Rate) -> None:
    tiles = random_tiles(rate, (3,))
    states = unpack_states(tiles, rate)
    assert states.dtype == np.uint16
    assert states.tolist() == [slow_states(tile, rate) for tile in tiles]


@RATES
def test_published_windows(rate: Rate) -> None:
    index = np.arange(1, rate.tile_words32 + 1, dtype=np.uint64)
    words = (index * 0x9E3779B1 % 2**32).astype("<u4").view(np.int16)
    states = unpack_states(words, rate)
    first, digest = WINDOWS[rate.bits]
    assert " ".join(f"{state:04x}" for state in states[:4]) == first
    assert hashlib.sha256(states.astype("<u2").tobytes()).hexdigest() == digest


def test_states_are_bit_exact(states_case: StatesCase) -> None:
    assert sha256(unpack_states(states_case.trellis, Rate.of(states_case.bits))) == states_case.states_sha256


def test_the_worked_example_of_k_4() -> None:
    words = (np.arange(64, dtype=np.uint32) * 40503 + 12345 & 0xFFFF).astype(np.uint16)
    assert [f"{word:04X}" for word in words[[0, 1, 62]]] == ["3039", "CE70", "818B"]
    states = unpack_states(words, Rate.of(4))
    assert [f"{state:04X}" for state in states[:4]] == ["18BC", "8BCE", "BCE7", "CE70"]
    assert f"{states[255]:04X}" == "818B"


@RATES
def test_pack_undoes_unpack_bit_for_bit(rate: Rate) -> None:
    tiles = random_tiles(rate, (2, 5), seed=1)
    packed = pack_states(unpack_states(tiles, rate), rate)
    assert packed.dtype == np.int16
    assert np.array_equal(packed, tiles)


@given(st.sampled_from(ALL_RATES), st.binary(min_size=256, max_size=256))
def test_any_bits_are_a_tile_and_survive_a_round_trip(rate: Rate, data: bytes) -> None:
    words = np.frombuffer(data[: rate.tile_bytes], dtype="<i2")
    states = unpack_states(words, rate)
    assert states.tolist() == slow_states(words, rate)
    assert chain_holds(states, rate)
    assert pack_states(states, rate).tobytes() == words.tobytes()


@given(st.sampled_from(ALL_RATES), st.integers(0, 255), st.integers(0, 15), st.integers(0, 2**32))
def test_one_flipped_state_bit_breaks_the_chain_unless_nothing_overlaps(
    rate: Rate, position: int, bit: int, seed: int
) -> None:
    states = unpack_states(random_tiles(rate, (), seed), rate)
    states[position] ^= 1 << bit
    assert not chain_holds(states, rate)


@RATES
def test_packing_keeps_the_symbols_of_states_that_do_not_chain(rate: Rate) -> None:
    states = np.random.default_rng(2).integers(0, 2**16, (4, 256), dtype=np.uint16)
    assert not chain_holds(states, rate)
    again = unpack_states(pack_states(states, rate), rate)
    mask = (1 << rate.advances()) - 1
    assert np.array_equal(again & mask, states & mask)
    assert not np.array_equal(again, states)


@RATES
def test_unsigned_words_and_strided_tiles_read_the_same(rate: Rate) -> None:
    tiles = random_tiles(rate, (4, 3), seed=3)
    expected = unpack_states(tiles, rate)
    assert np.array_equal(unpack_states(tiles.view(np.uint16), rate), expected)
    assert np.array_equal(unpack_states(tiles[::-1, ::2], rate), expected[::-1, ::2])
    assert np.array_equal(pack_states(expected[::-1, ::2], rate), tiles[::-1, ::2])
    assert np.array_equal(pack_states(expected.view(np.int16), rate), tiles)


def test_unpacking_leaves_its_input_alone() -> None:
    rate = Rate.of(2.5)
    tiles = random_tiles(rate, (2, 2))
    before = tiles.copy()
    tiles.setflags(write=False)
    unpack_states(tiles, rate)
    assert np.array_equal(tiles, before)


@RATES
def test_no_tiles_give_no_states(rate: Rate) -> None:
    states = unpack_states(np.zeros((0, 4, rate.tile_words16), np.int16), rate)
    assert states.shape == (0, 4, 256)
    assert pack_states(states, rate).shape == (0, 4, rate.tile_words16)
    assert chain_holds(states, rate)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.uint8, np.dtype(">i2")])
def test_words_must_be_16_bit_integers(dtype: np.dtype) -> None:
    with pytest.raises(FormatTypeError, match="must be int16, got"):
        unpack_states(np.zeros(48, dtype), Rate.of(3))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32])
def test_states_must_be_16_bit_integers(dtype: np.dtype) -> None:
    for function in (pack_states, chain_holds):
        with pytest.raises(FormatTypeError, match="states must be int16, got"):
            function(np.zeros(256, dtype), Rate.of(3))


@pytest.mark.parametrize("width", [0, 47, 49, 64])
def test_a_tile_has_exactly_16_k_words(width: int) -> None:
    with pytest.raises(FormatValueError, match=rf"K = 3 has 48 words, got shape \(2, {width}\)"):
        unpack_states(np.zeros((2, width), np.int16), Rate.of(3))


def test_packing_needs_256_states() -> None:
    with pytest.raises(FormatValueError, match=r"256 states, got shape \(255,\)"):
        pack_states(np.zeros(255, np.uint16), Rate.of(3))
