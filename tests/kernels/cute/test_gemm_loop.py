"""Holds the inner loop's registers to a matrix product: lane by lane in numpy, for every codebook and rate."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.codebooks import CODEBOOKS, get_codebook
from trellis_format.codebooks.mul1 import BIAS_BITS, SCALE_BITS
from trellis_format.codebooks.summed_halves import FIELD_MASK, FIELD_XOR
from trellis_format.rates import Rate
from trellis_format.ring import unpack_states
from trellis_format.tiles import decode_inner, join_tiles

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import codebooks, gemm_loop
from trellis_kernels.cute.archs import compiling_for
from trellis_kernels.cute.gemm_share import share_of
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS

PAIRS = [
    pytest.param(name, rate, id=f"{name}-{rate}")
    for name in (*codebooks.DEVICE_CODEBOOKS, *TABLE_CODEBOOKS)
    for rate in CODEBOOKS[name].legal_rates
]
STORED = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


class Memory:
    """Global loads and the matrix product, in numpy."""

    def __init__(self, codes: np.ndarray, rows: np.ndarray) -> None:
        self.codes, self.rows = codes.view(np.uint32).reshape(-1), rows.view(np.uint32).reshape(-1)

    def load_words(self, address, count, *, read_only=True, once=False):
        assert np.all(address % (4 * count) == 0)
        memory = self.codes if read_only else self.rows
        return [memory[address // 4 + index] for index in range(count)]

    @staticmethod
    def pull_from_lane(value, lane):
        return value[lane]

    @staticmethod
    def multiply_halves(a, b, c):
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for index in range(4):
            pair = np.ascontiguousarray(a[index]).view(np.float16).reshape(32, 2).astype(np.float64)
            for half in range(2):
                left[G + 8 * (index % 2), 2 * T + half + 8 * (index // 2)] = pair[:, half]
        for index in range(2):
            pair = np.ascontiguousarray(b[index]).view(np.float16).reshape(32, 2).astype(np.float64)
            for half in range(2):
                right[2 * T + half + 8 * index, G] = pair[:, half]
        product = left @ right
        return [c[z] + product[G + 8 * (z // 2), 2 * T + z % 2] for z in range(4)]

    @staticmethod
    def multiply_bytes(a, b, c):
        left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
        for index in range(4):
            four = np.ascontiguousarray(a[index]).view(np.uint8).reshape(32, 4)
            for byte in range(4):
                left[G + 8 * (index % 2), 4 * T + byte + 16 * (index // 2)] = four[:, byte]
        for index in range(2):
            four = np.ascontiguousarray(b[index]).view(np.int8).reshape(32, 4)
            for byte in range(4):
                right[4 * T + byte + 16 * index, G] = four[:, byte]
        product = left @ right
        return [c[z] + product[G + 8 * (z // 2), 2 * T + z % 2] for z in range(4)]


def run_step(monkeypatch, numpy_warp, codes, stored, rate, codebook, arithmetic, columns, within, s_table=0):
    """One step of strip 1 in numpy: finished sums `[4, columns, 4, lanes]`."""
    for module in (codebooks, gemm_loop):
        monkeypatch.setattr(module, "primitives", numpy_warp)
    monkeypatch.setattr(gemm_loop, "gemm_primitives", Memory(codes, stored))
    monkeypatch.setattr(gemm_loop, "Int64", np.int64)
    monkeypatch.setattr(gemm_loop, "Float32", np.float64)
    share = share_of(rate)
    words = np.zeros((1, share.step_words, 32), np.uint32)
    row_words = np.zeros((1, columns, gemm_loop.row_words(arithmetic), 32), np.uint32)
    sums = np.zeros((gemm_loop.sum_places(codebook, arithmetic), columns, 4, 32))
    g_share = 4 * rate.tile_bytes + gemm_loop.lane_offset(rate, codes.shape[1], LANE)
    gemm_loop.load_share(words, 0, g_share, share)
    gemm_loop.load_rows(row_words, 0, within, 0, columns, arithmetic)
    gemm_loop.consume(sums, words, row_words, 0, 0, share, LANE, s_table, codebook, columns, arithmetic)
    gemm_loop.finish_sums(sums, columns, codebook, arithmetic)
    return sums[:4]


def channel_of(rate: Rate, place: int) -> np.ndarray:
    """Output channel of each lane's sums of a place."""
    share = share_of(rate)
    piece, index = (0, place) if share.is_wide else (place, 0)
    return np.array([share.column(piece, index, g) for g in G])


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_one_step_of_a_strip_is_the_product(
    monkeypatch, numpy_warp, numpy_table, codebook: str, rate: Rate, target: str
) -> None:
    rng = np.random.default_rng(rate.half_bits)
    columns = 2
    codes = rng.integers(-(2**15), 2**15, (4, 8, rate.tile_words16), dtype=np.int16)
    rows = rng.standard_normal((16, 64)).astype(np.float16)
    stored = np.ascontiguousarray(rows.reshape(16, 4, 16)[:, :, STORED]).reshape(16, 64)
    within = [(column * 8 + G) * 128 + T * 32 for column in range(columns)]
    s_table = numpy_table(codebook, "compact")[1] if codebook in TABLE_CODEBOOKS else 0
    with compiling_for(target):
        sums = run_step(monkeypatch, numpy_warp, codes, stored, rate, codebook, "exact", columns, within, s_table)
    found = np.zeros((16, 64))
    for place in range(4):
        for column in range(columns):
            for z in range(4):
                found[column * 8 + 2 * T + z % 2, channel_of(rate, place) + 8 * (z // 2)] = sums[place, column, z]
    weight = decode_inner(codes, get_codebook(codebook), rate).astype(np.float64)[:, 64:128]
    np.testing.assert_allclose(found, rows.astype(np.float64) @ weight, rtol=1e-12, atol=1e-12)


def unrounded_weights(codes: np.ndarray, codebook: str, rate: Rate) -> np.ndarray:
    """`[k, n] float64`: weights of tiles by the laws as they stand, without their last rounding."""
    states = unpack_states(codes, rate).astype(np.uint64)
    law = get_codebook(codebook)
    if codebook == "mul1":
        hashed = states * law.multiplier & 0xFFFFFFFF
        sums = sum(hashed >> shift & 0xFF for shift in (0, 8, 16, 24))
        scale, bias = (np.array(b, np.uint16).view(np.float16).astype(np.float64) for b in (SCALE_BITS, BIAS_BITS))
        values = (1024.0 + sums) * scale + bias
    else:
        hashed = states * law.hash_multiplier + law.hash_addend & FIELD_MASK ^ FIELD_XOR
        halves = [(hashed >> shift & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64) for shift in (0, 16)]
        values = halves[0] + halves[1]
    return join_tiles(values)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(("codebook", "rate"), [pair for pair in PAIRS if pair.values[0] in codebooks.DEVICE_CODEBOOKS])
def test_one_step_of_unrounded_values_is_the_product_of_unrounded_weights(
    monkeypatch, numpy_warp, codebook: str, rate: Rate, columns: int
) -> None:
    rng = np.random.default_rng(rate.half_bits)
    count = 8 * columns
    codes = rng.integers(-(2**15), 2**15, (4, 8, rate.tile_words16), dtype=np.int16)
    rows = rng.standard_normal((count, 64)).astype(np.float16)
    stored = np.ascontiguousarray(rows.reshape(count, 4, 16)[:, :, STORED]).reshape(count, 64)
    within = [(column * 8 + G) * 128 + T * 32 for column in range(columns)]
    sums = run_step(monkeypatch, numpy_warp, codes, stored, rate, codebook, "unrounded", columns, within)
    found = np.zeros((count, 64))
    for place in range(4):
        for column in range(columns):
            for z in range(4):
                found[column * 8 + 2 * T + z % 2, channel_of(rate, place) + 8 * (z // 2)] = sums[place, column, z]
    truth = rows.astype(np.float64) @ unrounded_weights(codes, codebook, rate)[:, 64:128]
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-9)
    exact = rows.astype(np.float64) @ decode_inner(codes, get_codebook(codebook), rate).astype(np.float64)[:, 64:128]
    assert 0 < np.linalg.norm(found - exact) < 3e-4 * np.linalg.norm(exact)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rate", get_codebook("mul1").legal_rates, ids=str)
def test_one_step_of_bytes_is_the_product_of_byte_sums(monkeypatch, numpy_warp, rate: Rate, columns: int) -> None:
    rng = np.random.default_rng(rate.half_bits)
    count = 4 * columns
    codes = rng.integers(-(2**15), 2**15, (4, 8, rate.tile_words16), dtype=np.int16)
    whole = rng.integers(-32639, 32640, (count, 64))
    high = (whole + 128) >> 8
    parts = np.stack((high, whole - 256 * high), axis=1).reshape(count, 2, 4, 16)[..., STORED]
    stored = np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).astype(np.int8)
    within = [(column * 4 + G // 2) * 128 + T * 32 + G % 2 * 16 for column in range(columns)]
    sums = run_step(monkeypatch, numpy_warp, codes, stored, rate, "mul1", "bytes", columns, within)
    found = np.zeros((2, count, 64))
    for place in range(4):
        for column in range(columns):
            for z in range(4):
                found[z % 2, column * 4 + T, channel_of(rate, place) + 8 * (z // 2)] = sums[place, column, z]
    # the law is fp16(scale * (1024 + S) + bias), so rounding undone S is the nearest integer
    scale, bias = (np.array(bits, np.uint16).view(np.float16).astype(np.float64) for bits in (SCALE_BITS, BIAS_BITS))
    weight = decode_inner(codes, get_codebook("mul1"), rate).astype(np.float64)[:, 64:128]
    byte_sums = np.rint((weight - bias) / scale - 1024)
    np.testing.assert_array_equal(256 * found[0] + found[1], whole @ byte_sums)
