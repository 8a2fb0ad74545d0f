"""Owns a warp in numpy, which runs the plain-Python helpers of a kernel lane by lane where there is no GPU.

It stands in for `trellis_kernels.cute.primitives`, and checks what hardware would punish: misaligned and out-of-bounds
accesses, bank conflicts in shared memory, and stores that leave a 32-byte sector half written.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

Lanes = npt.NDArray[np.uint32]
Addresses = npt.NDArray[np.int64]

CODES_BASE = 1 << 33  # beyond 32 bits, so that a truncated address is out of bounds
OUT_BASE = 1 << 40
SHARED_BASE = 1 << 10
SECTOR = 32
BANKS = 32
G, T = np.arange(32) // 4, np.arange(32) % 4  # row or column, and place in it, of a lane in a product


def u32(value: object) -> Lanes:
    """Integers of any kind modulo 2^32."""
    return (np.asarray(value).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


class NumpyWarp:
    """32 lanes over one buffer of codes, one of output, and one of shared memory, each of bytes."""

    def __init__(self, codes: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8], shared_bytes: int) -> None:
        self.codes, self.out = codes, out
        self.shared = np.full(shared_bytes, 0xA5, np.uint8)
        self.lane = np.arange(32, dtype=np.int64)

    # registers
    def funnel_right(self, low: Lanes, high: Lanes | None, shift: int | Lanes) -> Lanes:
        wide = low.astype(np.uint64)
        if high is not None:
            wide |= high.astype(np.uint64) << np.uint64(32)
        return (wide >> np.asarray(shift).astype(np.uint64)).astype(np.uint32)

    def permute_bytes(self, low: Lanes, high: Lanes, selector: int) -> Lanes:
        source = np.stack([low, high], axis=-1).astype("<u4").view(np.uint8)
        chosen = [source[..., selector >> 4 * nibble & 7] for nibble in range(4)]
        return np.stack(chosen, axis=-1).copy().view("<u4")[..., 0]

    def multiply_add(self, value: Lanes, factor: int, addend: int) -> Lanes:
        return value * np.uint32(factor & 0xFFFFFFFF) + np.uint32(addend)

    def multiply_add_word(self, value: Lanes, factor: int, addend: Lanes) -> Lanes:
        return u32(value.astype(np.int64) * factor + addend)

    def and_xor(self, value: Lanes, mask: int, flips: int) -> Lanes:
        return value & np.uint32(mask) ^ np.uint32(flips)

    def add_halves(self, first: Lanes, second: Lanes) -> Lanes:
        sums = [halves(value)[..., 0] + halves(value)[..., 1] for value in (first, second)]
        return np.stack(sums, axis=-1).view(np.uint32)[..., 0]

    def dot_ones(self, value: Lanes, addend: int, factor: int = 1) -> Lanes:
        sums = np.ascontiguousarray(value)[..., None].view(np.uint8).sum(axis=-1).astype(np.uint32)
        return sums * np.uint32(factor) + np.uint32(addend)

    def take_half(self, value: Lanes, half: int) -> Lanes:
        return value >> np.uint32(16 * half) & np.uint32(0xFFFF)

    def join_low_halves(self, low: Lanes, high: Lanes) -> Lanes:
        return low + (high << np.uint32(16))

    def fma_f16x2(self, value: Lanes, scale_bits: int, bias_bits: int) -> Lanes:
        scale, bias = (
            np.array(bits, np.uint16).view(np.float16).astype(np.float64) for bits in (scale_bits, bias_bits)
        )
        return (halves(value).astype(np.float64) * scale + bias).astype(np.float16).view(np.uint32)[..., 0]

    def f16x2_to_bf16x2(self, pair: Lanes) -> Lanes:
        rounded = torch.from_numpy(halves(pair)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint32)[..., 0]

    def f16x2_to_f32(self, pair: Lanes) -> list[Lanes]:
        return list(np.ascontiguousarray(halves(pair).astype(np.float32).view(np.uint32).T))

    def own_columns(self, lane: Lanes, word: int) -> list[Lanes]:
        g, t = lane // 4, lane % 4
        return [np.where(g == 2 * t + column, word, 0).astype(np.uint32) for column in range(2)]

    def multiply_halves_to_halves(self, a: list[Lanes], b: list[Lanes], addend_bits: int) -> list[Lanes]:
        left, right = (operands(words, np.float16, 2).astype(np.float64) for words in (a, b))
        addend = float(np.array(addend_bits, np.uint16).view(np.float16))
        total = left @ np.swapaxes(right, -1, -2) + addend
        sums = total.astype(np.float16)  # spans few bits, so float64 is exact and this rounds once
        pairs = np.stack([sums[..., G + 8 * half, :] for half in range(2)])
        pairs = np.stack([pairs[..., np.arange(32), 2 * T + column] for column in range(2)], axis=-1)
        return [np.ascontiguousarray(pair).view(np.uint32)[..., 0] for pair in pairs]

    def multiply_bytes_plain(self, a: list[Lanes], b: list[Lanes]) -> list[Lanes]:
        left, right = (operands(words, np.uint8, 4).astype(np.int64) for words in (a, b))
        total = left @ np.swapaxes(right, -1, -2)
        return [u32(total[..., G + 8 * (z // 2), 2 * T + z % 2]) for z in range(4)]

    def word_of(self, value: int) -> Lanes:
        return np.full(32, value, np.uint32)

    def repeat_half(self, value: Lanes, half: int) -> Lanes:
        return np.repeat(halves(value)[..., half : half + 1], 2, axis=-1).copy().view(np.uint32)[..., 0]

    def reverse_bits(self, value: Lanes) -> Lanes:
        return np.array([int(f"{word:032b}"[::-1], 2) for word in value.tolist()], np.uint32)

    def float_bits(self, value: Lanes) -> Lanes:
        return value.astype(np.float32).view(np.uint32)

    def evaluate_line(self, segment: Lanes, end_bits: Lanes, start_bits: Lanes) -> Lanes:
        base, slope = halves(segment).astype(np.float64).T
        place = (end_bits.view(np.float32).astype(np.float64) - start_bits.view(np.float32) - 1.0) / 2.0
        return (slope * place + base).astype(np.float32).view(np.uint32)

    def f32_to_f16x2(self, low_bits: Lanes, high_bits: Lanes) -> Lanes:
        pair = np.stack([low_bits.view(np.float32), high_bits.view(np.float32)], axis=-1).astype(np.float16)
        return pair.view(np.uint32)[..., 0]

    # memory
    def load_shared_half(self, base: int, offset: Lanes) -> Lanes:
        check_aligned(offset, 2)
        words = gather(self.shared, base - SHARED_BASE + (offset // 4 * 4).astype(np.int64), 1)[:, 0]
        return words >> (8 * (offset % 4)) & np.uint32(0xFFFF)

    def load_shared_byte(self, base: int, offset: Lanes) -> Lanes:
        return self.shared[base - SHARED_BASE + offset.astype(np.int64)].astype(np.uint32)

    def load_shared_word(self, base: int, offset: Lanes) -> Lanes:
        check_aligned(offset, 4)
        return gather(self.shared, base - SHARED_BASE + offset.astype(np.int64), 1)[:, 0]

    def load_global_word(self, address: Addresses) -> Lanes:
        check_aligned(address, 4)
        return gather(self.codes, address - CODES_BASE, 1)[:, 0]

    def load_shared(self, address: Addresses, words: int) -> list[Lanes]:
        check_aligned(address, 4 * words)
        lanes_at_once = BANKS // words
        for start in range(0, 32, lanes_at_once):
            check_banks(address[start : start + lanes_at_once], words)
        return list(gather(self.shared, address - SHARED_BASE, words).T)

    def store_global_16_bytes(self, address: Addresses, words: list[Lanes], predicate: npt.NDArray[np.bool_]) -> None:
        check_aligned(address, 16)
        used = np.broadcast_to(predicate, address.shape)
        offsets = address[used] - OUT_BASE
        sectors, counts = np.unique(offsets // SECTOR, return_counts=True)
        assert np.all(counts == SECTOR // 16), f"sectors {sectors[counts != 2]} are half written"
        scatter(self.out, offsets, np.stack(words, axis=1)[used])

    def store_matrices_transposed(self, address: Addresses, matrices: list[Lanes]) -> None:
        check_aligned(address, 16)
        for index, matrix in enumerate(matrices):
            rows = address[8 * index : 8 * index + 8]
            check_banks(rows, 4)
            scatter(self.shared, rows - SHARED_BASE, transposed(matrix))

    def store_transposed_by_shuffle(self, address: Addresses, matrix: Lanes) -> None:
        check_aligned(address, 4)
        check_banks(address, 1)
        scatter(self.shared, address - SHARED_BASE, transposed(matrix).reshape(32, 1))

    def sync_warp(self) -> None:
        """Nothing: the lanes here run in step."""


def halves(value: Lanes) -> npt.NDArray[np.float16]:
    """`[lanes] uint32` to the two fp16 values of each, low half first."""
    return np.ascontiguousarray(value).view(np.float16).reshape(-1, 2)


def operands(words: list[Lanes], kind: type, count: int) -> npt.NDArray[np.generic]:
    """Registers `[..., 32]` of operand A (four) or B (two) of a product, as its rows or columns by inputs."""
    sides = len(words) // 2
    matrix = np.zeros((*np.broadcast_shapes(*(word.shape[:-1] for word in words)), 8 * sides, 8 * count), kind)
    for index, word in enumerate(words):
        values = np.ascontiguousarray(word)[..., None].view(kind)
        for place in range(count):
            matrix[..., G + 8 * (index % sides), count * T + place + 4 * count * (index // sides)] = values[..., place]
    return matrix


def transposed(matrix: Lanes) -> Lanes:
    """The fragment of an 8 x 8 matrix of 16-bit values to the four words of each of its columns."""
    return np.ascontiguousarray(np.ascontiguousarray(matrix).view(np.uint16).reshape(8, 8).T).view(np.uint32)


def gather(memory: npt.NDArray[np.uint8], offsets: Addresses, words: int) -> Lanes:
    """`[lanes, words] uint32` at byte offsets."""
    index = offsets[:, None] + np.arange(4 * words)
    assert index.min() >= 0
    assert index.max() < memory.size
    return memory[index].view("<u4")


def scatter(memory: npt.NDArray[np.uint8], offsets: Addresses, words: Lanes) -> None:
    """Write `[lanes, words] uint32` at byte offsets; no byte twice."""
    data = np.ascontiguousarray(words).view(np.uint8)
    index = offsets[:, None] + np.arange(data.shape[1])
    assert index.size == np.unique(index).size
    if index.size:
        assert index.min() >= 0
        assert index.max() < memory.size
    memory[index] = data


def check_aligned(address: Addresses, unit: int) -> None:
    assert np.all(address % unit == 0), f"{address} not a multiple of {unit}"


def check_banks(address: Addresses, words: int) -> None:
    """Lanes that access shared memory at once use each bank once."""
    banks = (address[:, None] // 4 + np.arange(words)) % BANKS
    assert np.unique(banks).size == banks.size, f"bank conflict at {address}"


def table_words(codebook: str, form: str) -> Lanes:
    """The table of a codebook, or no words."""
    from trellis_kernels.cute.table_codebooks import table_codebook

    tabled = table_codebook(codebook, form)
    return np.zeros(0, np.uint32) if tabled is None else tabled.words


@pytest.fixture
def numpy_table(monkeypatch: pytest.MonkeyPatch):
    """`(codebook, form)` to its device side in numpy and the address of its table in a warp's shared memory."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute import table_codebooks

    def place(codebook: str, form: str):
        nothing, words = np.zeros(0, np.uint8), table_words(codebook, form)
        warp = NumpyWarp(nothing, nothing, words.nbytes)
        warp.shared[:] = words.view(np.uint8)
        monkeypatch.setattr(table_codebooks, "primitives", warp)
        return table_codebooks.table_codebook(codebook, form), SHARED_BASE

    return place


@pytest.fixture
def numpy_warp() -> NumpyWarp:
    """Register functions in numpy, for arrays of any length."""
    nothing = np.zeros(0, np.uint8)
    return NumpyWarp(nothing, nothing, 0)


@pytest.fixture
def run_decode(monkeypatch: pytest.MonkeyPatch):
    """The decode kernel's strips in numpy: `(codes, rate, codebook, out dtype, has_stmatrix)` to the output's bytes."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute import codebooks, decode, table_codebooks
    from trellis_kernels.cute.keys import VALUE_BYTES

    def run(codes, rate, codebook, out_dtype, has_stmatrix, form="compact"):
        k_tiles, n_tiles, _ = codes.shape
        row_bytes = 256 * n_tiles * VALUE_BYTES[out_dtype]
        out = np.full(k_tiles * row_bytes, 0xA5, np.uint8)
        staging = 4 * decode._STRIP_BYTES
        table = table_words(codebook, form).view(np.uint8)
        warp = NumpyWarp(np.ascontiguousarray(codes).view(np.uint8).reshape(-1), out, staging + table.size)
        for module in (decode, codebooks, table_codebooks):
            monkeypatch.setattr(module, "primitives", warp)
        monkeypatch.setattr(decode, "cutlass", SimpleNamespace(min=np.minimum))
        for name, convert in (("Int64", np.int64), ("Uint32", u32), ("Boolean", np.asarray)):
            monkeypatch.setattr(decode, name, convert)
        for row, first in itertools.product(range(k_tiles), range(0, n_tiles, decode._STRIP)):
            warp.shared[:] = 0xA5
            warp.shared[staging:] = table
            decode._decode_strip(
                CODES_BASE + row * n_tiles * rate.tile_bytes,
                OUT_BASE + row * row_bytes,
                SHARED_BASE + first // decode._STRIP % 4 * decode._STRIP_BYTES,
                first,
                n_tiles,
                warp.lane,
                rate,
                codebook,
                out_dtype,
                has_stmatrix,
                SHARED_BASE + staging,
                form,
            )
        return out

    return run
