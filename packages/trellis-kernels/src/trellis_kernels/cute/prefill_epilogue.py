"""Owns what becomes of the many-row GEMM's sums: rotations, scales, biases and activation, and the stores.

It must not know codes, pipelines or routing beyond the route of a packed row.

Sums lie in registers by the fragments of `wgmma`: a lane has four channels of a row.  32 rows at a time, a warpgroup
butterflies those, writes them to shared memory, and reads them back with one row and 32 channels in each lane, where
the other five butterflies are register additions.  Everything is fp32.  Staged channels lie in the order

    place  64 c + 32 h + ((8 w + g) ^ 16 h)         of output channel 32 w + 16 (g // 4) + 2 (g % 4) + c + 8 h

in which neither side has a bank conflict, apart from a two-way one where whole rows are read.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_math, wgmma
from trellis_kernels.cute.prefill_key import ROW_UNIT
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, PANEL_ROW_BYTES, PIECE_BYTES, ROW_GROUP

__all__ = ["finish_join", "finish_rows"]

_PITCH = (BLOCK_CHANNELS + 4) * 4  # bytes between staged rows
_NORM = 1.0 / math.sqrt(HADAMARD_BLOCK)
_LANE_CHANNELS = 32  # of a row, in one lane
_BOTH_GROUPS = 3  # named barrier of both warpgroups; 1 and 2 are each one's own


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _sync_group(group: Int32) -> None:
    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)


def _sync_both() -> None:
    cute.arch.barrier(barrier_id=_BOTH_GROUPS, number_of_threads=256)


def _this_thread() -> tuple[Int32, Int32, Int32]:
    """Warpgroup, its warp, and lane."""
    thread = wgmma.thread_index()
    warp = cute.arch.make_warp_uniform(thread >> 5)
    return warp >> 2, warp & 3, thread & 31


def _staged_lane(warp: Int32, lane: Int32) -> list[Int32]:
    """Bytes to this lane's first staged sum, for half 0 and 1."""
    place = 8 * warp + (lane >> 2)
    row = (lane & 3) * (2 * _PITCH)
    return [row + place * 4, row + (32 + (place ^ 16)) * 4]


def _butterfly(values: list[Any], bits: int) -> list[Any]:
    """The unnormalised Hadamard transform over the lowest bits of the index."""
    for bit in range(bits):
        half = 1 << bit
        values = [
            values[index - half] - value if index & half else value + values[index + half]
            for index, value in enumerate(values)
        ]
    return values


def _stage_sums(sums: Any, s_lane: list[Int32], rotate: bool) -> None:
    """Write 32 rows of a warpgroup's sums; `sums(column, index)` is sum `index` of the fragment of that unit."""
    for eight in range(ROW_UNIT // 8):
        for odd in range(2):
            values = [sums(place // 2, 4 * eight + 2 * (place % 2) + odd) for place in range(4)]  # place = 2 c + h
            if rotate:
                values = _butterfly(values, 2)
            row = (8 * eight + odd) * _PITCH
            for place, value in enumerate(values):
                gpu.store_shared_floats(s_lane[place % 2] + row + (place // 2) * 256, [value])


def _lane_row(s_sums: Int32, warp: Int32, lane: Int32) -> list[Int32]:
    """Addresses of the lower and upper 16 channels of the row and quarter that this lane reads: row `lane`."""
    half = warp & 1
    base = s_sums + lane * _PITCH + warp * 128
    return [base + half * 64, base + 64 - half * 64]


def _read_row(s_row: list[Int32]) -> list[Float32]:
    return [
        value
        for part in range(2)
        for first in range(0, 16, 4)
        for value in gpu.load_shared_floats(s_row[part] + first * 4, 4)
    ]


def _write_row(s_row: list[Int32], values: list[Float32]) -> None:
    for part in range(2):
        for first in range(0, 16, 4):
            gpu.store_shared_floats(s_row[part] + first * 4, values[16 * part + first : 16 * part + first + 4])


def _row_part(s_sums: Int32, warp: Int32, lane: Int32) -> Int32:
    """Address of channels 4 lane to 4 lane + 3 of row 8 warp: two pairs of places, one for each c."""
    half = (lane >> 1) & 1
    place = (8 * (lane >> 3) + 4 * ((lane >> 2) & 1) + 2 * (lane & 1)) ^ (16 * half)
    return s_sums + (8 * warp) * _PITCH + (32 * half + place) * 4


def _read_part(s_part: Int32, row: int) -> list[Float32]:
    """Four consecutive channels, `row` rows further."""
    even = gpu.load_shared_floats(s_part + row * _PITCH, 2)
    odd = gpu.load_shared_floats(s_part + (row * _PITCH + 256), 2)
    return [even[0], odd[0], even[1], odd[1]]


def _scaled(values: list[Float32], s_factors: Int32, s_addends: Int32 | None = None) -> list[Float32]:
    """A lane's 32 values times 32 that the whole warp shares, plus 32 more."""
    result: list[Float32] = []
    for first in range(0, _LANE_CHANNELS, 4):
        part = values[first : first + 4]
        factors = gpu.load_shared_floats(s_factors + first * 4, 4)
        if s_addends is None:
            result += [a * b for a, b in zip(part, factors, strict=True)]
        else:
            addends = gpu.load_shared_floats(s_addends + first * 4, 4)
            result += [gpu.fma(a, b, c) for a, b, c in zip(part, factors, addends, strict=True)]
    return result


def _scale_pairs(words: list[Any]) -> list[Float32]:
    return [value for word in words for value in gpu.floats_from(word, "float16")]


@cute.jit
def finish_rows(
    r_sums: cute.Tensor,
    s_work: Int32,
    out: Int64,
    routes: Int64,
    scales: Int64,
    bias: Int64,
    expert: Int32,
    first_slot: Int32,
    rows: Int32,
    column_block: Int32,
    blocks: Int32,
    scale_pitch: Int32,
    bias_pitch: Int32,
    key: Constexpr,
):
    """Write a warpgroup's block of a row block to the routes' rows, rotated out for `down`."""
    group, warp, lane = _this_thread()
    block = 2 * column_block + group
    rotated = key.epilogue == "down"
    value_bytes = 2 if key.out_dtype == "float16" else 4
    s_sums = s_work + group * key.sum_bytes
    s_lane = [s_sums + offset for offset in _staged_lane(warp, lane)]
    s_row = _lane_row(s_sums, warp, lane)
    channel = cutlass.min(block, blocks - 1) * BLOCK_CHANNELS + 4 * lane
    factors = [Float32(1.0)] * 4
    addends = [Float32(0.0)] * 4
    if cutlass.const_expr(rotated):
        g_scales = scales + (Int64(expert) * Int64(scale_pitch) + Int64(channel)) * 2
        factors = [value * Float32(_NORM) for value in _scale_pairs(gpu.load_words(g_scales, 2))]
        if cutlass.const_expr(key.biased[0]):
            g_bias = bias + (Int64(expert) * Int64(bias_pitch) + Int64(channel)) * 2
            addends = _scale_pairs(gpu.load_words(g_bias, 2))
    s_read = _row_part(s_sums, warp, lane)
    width = Int64(blocks * BLOCK_CHANNELS)
    for unit in cutlass.range_constexpr(4):
        if rows > ROW_UNIT * unit:
            _stage_sums(lambda column, index, unit=unit: r_sums[column, 16 * unit + index], s_lane, rotated)
            _sync_group(group)
            if cutlass.const_expr(rotated):
                _write_row(s_row, _butterfly(_read_row(s_row), 5))
                _sync_group(group)
            for index in cutlass.range_constexpr(8):
                row = ROW_UNIT * unit + 8 * warp + index
                slot = first_slot + cutlass.min(row, rows - 1)
                route = gpu.load_ints(routes + Int64(slot) * 4, 1)[0]
                values = _read_part(s_read, index)
                if cutlass.const_expr(rotated):
                    values = [gpu.fma(v, f, a) for v, f, a in zip(values, factors, addends, strict=True)]
                g_out = out + (Int64(route) * width + Int64(channel)) * value_bytes
                live = Boolean(row < rows) & Boolean(block < blocks)
                if cutlass.const_expr(value_bytes == 4):
                    gpu.store_floats(g_out, values, live)
                else:
                    words = [gpu.pack_halves(values[0], values[1]), gpu.pack_halves(values[2], values[3])]
                    gpu.store_words(g_out, words, live)
            _sync_group(group)


def _fill_table(
    s_table: Int32, g_table: Int64, expert: Int32, pitch: Int32, block: Int32, factor: float, warp: Int32, lane: Int32
) -> None:
    """Write a block's fp16 table entries in staged order, without its exclusive-or, times a factor."""
    place = 32 * warp + lane
    g = place & 7
    channel = 32 * ((place >> 3) & 3) + 16 * (g >> 2) + 2 * (g & 3) + (place >> 6) + 8 * ((place >> 5) & 1)
    g_value = g_table + (Int64(expert) * Int64(pitch) + Int64(block * BLOCK_CHANNELS + channel)) * 2
    value = gpu.float_from(gpu.load_half(g_value), "float16", 0)
    gpu.store_shared_floats(s_table + place * 4, [value * Float32(factor)])


def _store_image(
    s_sums: Int32, out: Int64, panel: Int32, slot: Int32, rows: Int32, row: Int32, out_rows: Int32, warp: Int32,
    lane: Int32,
) -> None:  # fmt: skip
    """Butterfly the last two bits and write 32 rows of an image, rounded to fp16; a lane has a row's fragment i."""
    inside = 8 * warp + (lane >> 2)
    i = lane & 3
    s_read = s_sums + inside * _PITCH
    pieces: list[list[Any]] = [[None] * 8 for _ in range(4)]  # [2 panel + h][2 t + c]
    for high in range(2):
        for t in range(4):
            # channel bits: 4 and 5 are t, 6 is the panel; bit 4 is g's highest, 5 and 6 the warp
            index = 8 * ((t >> 1) + 2 * high) + 4 * (t & 1)
            values = []
            for place in range(4):  # 2 c + h
                flip = 16 * (place & 1)
                offset = 64 * (place >> 1) + 32 * (place & 1) + (index ^ flip)
                values.append(gpu.load_shared_floats(s_read + (i + offset) * 4, 1)[0])
            for place, value in enumerate(_butterfly(values, 2)):
                pieces[2 * high + (place & 1)][2 * t + (place >> 1)] = value
    image_slot = slot + row + inside
    swizzle = image_slot & (ROW_GROUP - 1)
    live = Boolean(row + inside < rows)
    for index, piece in enumerate(pieces):
        g_row = out + (Int64(panel + index // 2) * Int64(out_rows) + Int64(image_slot)) * PANEL_ROW_BYTES
        g_piece = g_row + Int64(((2 * i + index % 2) ^ swizzle) * PIECE_BYTES)
        gpu.store_words(g_piece, [gpu.pack_halves(piece[2 * t], piece[2 * t + 1]) for t in range(4)], live)


@cute.jit
def finish_join(
    r_sums: cute.Tensor,
    s_work: Int32,
    out: Int64,
    gate_scales: Int64,
    up_scales: Int64,
    input_scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    expert: Int32,
    image_slot: Int32,
    rows: Int32,
    column_block: Int32,
    blocks: Int32,
    out_rows: Int32,
    scale_pitch: Int32,
    input_scale_pitch: Int32,
    bias_pitch: Int32,
    key: Constexpr,
):
    """Rotate out, scale, activate, scale, rotate in, and write the image of the down projection's rows.

    With a gate, warpgroup 0 has gate and 1 has up of the same channels.  Of each 64 rows each rotates all out, gives
    the other the half that the other finishes, and finishes its own.
    """
    group, warp, lane = _this_thread()
    block = column_block if cutlass.const_expr(key.gated) else 2 * column_block + group
    inside = cutlass.min(block, blocks - 1)
    s_tables = s_work + 2 * key.sum_bytes + group * key.table_bytes
    scales = up_scales if group == 1 else gate_scales
    bias = up_bias if group == 1 else gate_bias
    biased = key.biased[0] or key.biased[-1]
    _fill_table(s_tables, scales, expert, scale_pitch, inside, _NORM, warp, lane)
    _fill_table(s_tables + 512, input_scales, expert, input_scale_pitch, inside, _NORM, warp, lane)
    if cutlass.const_expr(biased):
        if bias != 0:
            _fill_table(s_tables + 1024, bias, expert, bias_pitch, inside, 1.0, warp, lane)
        else:  # only the other branch has one
            gpu.store_shared_floats(s_tables + 1024 + (32 * warp + lane) * 4, [Float32(0.0)])
    s_scales = s_tables + warp * 128
    if cutlass.const_expr(key.gated):
        s_gives = s_work + group * key.sum_bytes
        s_keeps = s_gives + key.sum_bytes // 2
        s_takes = s_work + (1 - group) * key.sum_bytes
        for pair in cutlass.range_constexpr(2):
            if rows > 2 * ROW_UNIT * pair:
                low, high = 32 * pair, 32 * pair + 16

                def given(column: int, index: int, low: int = low, high: int = high) -> Float32:
                    return wgmma.pick(group, r_sums[column, high + index], r_sums[column, low + index])

                def kept(column: int, index: int, low: int = low, high: int = high) -> Float32:
                    return wgmma.pick(group, r_sums[column, low + index], r_sums[column, high + index])

                _stage_sums(given, [s_gives + offset for offset in _staged_lane(warp, lane)], True)
                _stage_sums(kept, [s_keeps + offset for offset in _staged_lane(warp, lane)], True)
                _sync_group(group)
                s_row = _lane_row(s_gives, warp, lane)
                _write_row(s_row, _rotate_out(s_row, s_scales, biased))
                s_row = _lane_row(s_keeps, warp, lane)
                own = _rotate_out(s_row, s_scales, biased)
                _sync_both()
                others = _read_row(_lane_row(s_takes, warp, lane))
                gate = [wgmma.pick(group, a, b) for a, b in zip(own, others, strict=True)]
                up = [wgmma.pick(group, b, a) for a, b in zip(own, others, strict=True)]
                joined = moe_math.activate(gate, up, key.activation)
                _write_row(s_row, _butterfly(_scaled(joined, s_scales + 512), 5))
                _sync_both()
                first = 2 * ROW_UNIT * pair + ROW_UNIT * group
                _store_image(s_keeps, out, 2 * block, image_slot, rows, first, out_rows, warp, lane)
                _sync_group(group)
    else:
        s_sums = s_work + group * key.sum_bytes
        s_row = _lane_row(s_sums, warp, lane)
        live_rows = rows if block < blocks else Int32(0)
        for unit in cutlass.range_constexpr(4):
            if rows > ROW_UNIT * unit:
                _stage_sums(
                    lambda column, index, unit=unit: r_sums[column, 16 * unit + index],
                    [s_sums + offset for offset in _staged_lane(warp, lane)],
                    True,
                )
                _sync_group(group)
                joined = moe_math.activate(None, _rotate_out(s_row, s_scales, biased), key.activation)
                _write_row(s_row, _butterfly(_scaled(joined, s_scales + 512), 5))
                _sync_group(group)
                _store_image(
                    s_sums, out, 2 * block, image_slot, live_rows, Int32(ROW_UNIT * unit), out_rows, warp, lane
                )
                _sync_group(group)


def _rotate_out(s_row: list[Int32], s_scales: Int32, biased: bool) -> list[Float32]:
    """The staged row rotated out, scaled and biased; 32 channels of it."""
    return _scaled(_butterfly(_read_row(s_row), 5), s_scales, s_scales + 1024 if biased else None)
