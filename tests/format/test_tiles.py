"""Holds the tile map and the decode of tiles to the rules, to golden tiles, and to the peer's weights."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_set import InnerCase, sha256
from trellis_format.codebooks import EXL3_CODEBOOKS, get_codebook
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import unpack_states
from trellis_format.tiles import COLUMN, ELEMENT, POSITION, ROW, decode_inner, join_tiles, split_tiles

PAIRS = [(name, rate) for name, codebook in EXL3_CODEBOOKS.items() for rate in codebook.legal_rates]

# One tile whose word i is (40503 i + 12345) mod 65536: states 0..3, 254, 255, CRC-32 of the states, CRC-32 of the
# row-major fp16 tile for 3inst, mcg and mul1.
GOLDEN = {
    1: ("AE77 5CEF B9DE 73BC 6B9D D73B", 0x7662FA40, (0xF6D7657A, 0xC224991F, 0xDB66D975)),
    2: ("EAAF AABC AAF3 ABCE AEAA BAAB", 0x0CC14928, (0x38D40EEA, 0x96FC911A, 0xFA102047)),
    3: ("F0DE 86F3 379C BCE7 53C3 9E1B", 0xC40D3FE6, (0x27A4178E, 0x2AFABE76, 0x4449A39E)),
    4: ("18BC 8BCE BCE7 CE70 2818 818B", 0xB1948730, (0x5986DBC4, 0x91A38E6A, 0x271B44BC)),
    5: ("9F79 EF39 E738 E703 9327 64FB", 0xA766DCEC, (0x49B592C6, 0x512C6C01, 0x891E49DE)),
    6: ("1AF3 BCE7 39C0 7030 8921 486B", 0x86FA3ADB, (0x414D117B, 0x8CFA064B, 0x6305703B)),
    7: ("EDE7 F39C CE06 0303 2457 2BDB", 0x84D184D4, (0x9DEE1AF1, 0x959B88F4, 0x229CCBA7)),
    8: ("4BCE CE70 7030 3039 820F 0F4B", 0x43EB63ED, (0xB0DF5439, 0xA5BC8185, 0xE10FD750)),
    1.5: ("91E7 479E 8F3C 3CF3 B23C C8F3", 0x944B5A9C, (None, None, 0x29358D9A)),
    2.5: ("B18F 8C79 31E7 8F39 558C AC63", 0xCD242E32, (None, None, 0x6FDB588F)),
    3.5: ("7E9E E9E7 4F39 F39C A8FD 8FD3", 0x8F6033D7, (None, None, 0x66EA388A)),
}


def golden_words(rate: Rate) -> np.ndarray:
    index = np.arange(rate.tile_words16, dtype=np.uint32)
    return (index * 40503 + 12345 & 0xFFFF).astype(np.uint16).view(np.int16)


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_golden_states(rate: Rate) -> None:
    states = unpack_states(golden_words(rate), rate)
    shown, crc, _ = GOLDEN[rate.bits]
    assert " ".join(f"{states[place]:04X}" for place in (0, 1, 2, 3, 254, 255)) == shown
    assert zlib.crc32(states.astype("<u2").tobytes()) == crc


@pytest.mark.parametrize(("name", "rate"), PAIRS, ids=str)
def test_golden_tiles(name: str, rate: Rate) -> None:
    tile = decode_inner(golden_words(rate)[None, None], get_codebook(name), rate)
    assert tile.shape == (16, 16)
    assert zlib.crc32(tile.astype("<f2").tobytes()) == GOLDEN[rate.bits][2][list(EXL3_CODEBOOKS).index(name)]


def test_golden_table_has_every_pair() -> None:
    known = {
        (name, bits) for bits, row in GOLDEN.items() for name, crc in zip(EXL3_CODEBOOKS, row[2], strict=True) if crc
    }
    assert known == {(name, rate.bits) for name, rate in PAIRS}
    assert len(known) == 27


def test_decode_is_bit_exact(inner_case: InnerCase) -> None:
    weight = decode_inner(inner_case.trellis, get_codebook(inner_case.codebook), Rate.of(inner_case.bits))
    assert weight.dtype == np.float16
    assert sha256(weight) == inner_case.weight_sha256


def test_peer_weights_cover_every_pair(data_set: object) -> None:
    known = {(case.codebook, case.bits) for case in data_set.inner_cases.values()}  # type: ignore[attr-defined]
    assert known == {(name, rate.bits) for name, rate in PAIRS}


def test_the_map_is_the_one_of_the_rules() -> None:
    for position in range(256):
        lane, j = position >> 3, position & 7
        assert ROW[position] == 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1)
        assert COLUMN[position] == (lane >> 2) + 8 * (j >> 2)
        assert ELEMENT[position] == 16 * ROW[position] + COLUMN[position]
    assert ELEMENT[[0, 1, 2, 3, 4, 5, 6, 7, 8, 32]].tolist() == [0, 16, 128, 144, 8, 24, 136, 152, 32, 1]


def test_the_map_is_a_bijection_and_position_its_inverse() -> None:
    assert sorted(ELEMENT.tolist()) == list(range(256))
    assert np.array_equal(ELEMENT[POSITION], np.arange(256))
    assert np.array_equal(POSITION[ELEMENT], np.arange(256))


def test_lanes_hold_the_fragments_of_two_mma_operands() -> None:
    # b0, b1 of lane L are rows 2(L mod 4) and +1, b2, b3 eight rows below, all of column L div 4.
    for lane in range(32):
        rows, columns = ROW[8 * lane : 8 * lane + 8], COLUMN[8 * lane : 8 * lane + 8]
        base = 2 * (lane % 4)
        assert rows.tolist() == [base, base + 1, base + 8, base + 9] * 2
        assert columns.tolist() == [lane // 4] * 4 + [lane // 4 + 8] * 4


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_split_undoes_join(k_tiles: int, n_tiles: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(k_tiles, n_tiles, 256)).astype(np.float16)
    matrix = join_tiles(values)
    assert matrix.shape == (16 * k_tiles, 16 * n_tiles)
    assert np.array_equal(split_tiles(matrix), values)
    tile_k, tile_n = k_tiles - 1, n_tiles - 1
    for position in (0, 7, 100, 255):
        place = 16 * tile_k + ROW[position], 16 * tile_n + COLUMN[position]
        assert matrix[place] == values[tile_k, tile_n, position]


@given(st.sampled_from(PAIRS), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_decode_is_the_scalar_law_at_each_place(pair: tuple[str, Rate], k_tiles: int, n_tiles: int, seed: int) -> None:
    codebook, rate = get_codebook(pair[0]), pair[1]
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-(2**15), 2**15, (k_tiles, n_tiles, rate.tile_words16), dtype=np.int16)
    weight = decode_inner(trellis, codebook, rate)
    for _ in range(8):
        i, j, t = rng.integers(k_tiles), rng.integers(n_tiles), rng.integers(256)
        state = int(unpack_states(trellis[i, j], rate)[t])
        assert float(weight[16 * i + ROW[t], 16 * j + COLUMN[t]]) == codebook.value(state)


@pytest.mark.parametrize("shape", [(4, 48), (48,), (1, 1, 1, 48)])
def test_a_trellis_is_3d(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatValueError, match=r"trellis must be 3-D .*got shape"):
        decode_inner(np.zeros(shape, np.int16), get_codebook("mcg"), Rate.of(3))


def test_decode_refuses_what_ring_and_codebook_refuse() -> None:
    with pytest.raises(FormatValueError, match=r"half rate K = 2\.5"):
        decode_inner(np.zeros((1, 1, 40), np.int16), get_codebook("mcg"), Rate.of(2.5))
    with pytest.raises(FormatValueError, match="K = 3 has 48 words"):
        decode_inner(np.zeros((1, 1, 47), np.int16), get_codebook("mcg"), Rate.of(3))
    with pytest.raises(FormatTypeError, match="must be int16"):
        decode_inner(np.zeros((1, 1, 48), np.int32), get_codebook("mcg"), Rate.of(3))


@pytest.mark.parametrize("shape", [(16, 17), (15, 16), (1, 1)])
def test_split_needs_whole_tiles(shape: tuple[int, int]) -> None:
    with pytest.raises(FormatValueError, match=f"{shape[0]} x {shape[1]} does not divide into tiles of 16 x 16"):
        split_tiles(np.zeros(shape))
