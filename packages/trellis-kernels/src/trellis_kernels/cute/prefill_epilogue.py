"""Owns what becomes of the many-row GEMM's sums: rotations, scales, biases and activation, and the stores.

It must not know codes, pipelines or routing beyond the route of a packed row.

Sums lie in registers by the fragments of a matrix product: of each token row that a lane has, it holds the two channels
that differ in bit 3, and warps 0 to 3 and 4 to 7 hold channels of different bit 0.  A pass of rows at a time, all warps
butterfly bit 3 and write their sums to shared memory; then a lane reads one row's 64 channels of one value of bit 3,
and the other six butterflies are register additions.  Those channels are eight runs of eight, which are 16 bytes of a
float16 row and also a piece of an image; lanes 16 apart have the halves of each 32 bytes.  Everything is fp32.  Staged
channels lie in the order

    place  64 h + 32 c + 8 w + g                    of output channel 32 w + 16 (g // 4) + 2 (g % 4) + c + 8 h

in which neither side has a bank conflict.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_math, primitives, wgmma
from trellis_kernels.cute import values as rounding
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.prefill_arguments import GemmArguments
from trellis_kernels.cute.prefill_key import INFO_HEADER_BYTES, ROW_UNIT, GemmKey, info_table
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, PANEL_ROW_BYTES, PIECE_BYTES, ROW_GROUP

__all__ = ["fill_tables", "finish_join", "finish_rows", "keep_gate"]

_PITCH = (BLOCK_CHANNELS + 4) * 4  # bytes between staged rows
_NORM = 1.0 / math.sqrt(HADAMARD_BLOCK)
_HALF_CHANNELS = BLOCK_CHANNELS // 2
_HALF_BYTES = _HALF_CHANNELS * 4
_THREADS = 256
_WARP_ROWS = 16  # of a pass
_RUNS = 8
_RUN = 8  # channels
_TABLE_BYTES = BLOCK_CHANNELS * 4
_TABLE_THREADS = BLOCK_CHANNELS // 2
_HALF_LANES = 16
_BLOCK_BYTES = BLOCK_CHANNELS * 2  # of a float16 row
_STASH_BYTES = 16  # that a thread stores at once
_JOINED_AT_ONCE = 4  # channels


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _sync() -> None:
    cute.arch.barrier(barrier_id=1, number_of_threads=_THREADS)


def _this_thread() -> tuple[Int32, Int32, Int32]:
    """Thread of both warpgroups, its warp, and lane."""
    thread = wgmma.thread_index()
    return thread, cute.arch.make_warp_uniform(thread >> 5), thread & 31


def _staged_lane(warp: Int32, lane: Int32) -> Int32:
    """Bytes to this lane's first staged sum; `warp` is that of both warpgroups."""
    return (lane & 3) * (2 * _PITCH) + (8 * warp + (lane >> 2)) * 4


def _butterfly(values: list[Any], bits: int) -> list[Any]:
    """The unnormalised Hadamard transform over the lowest bits of the index."""
    for bit in range(bits):
        half = 1 << bit
        values = [
            values[index - half] - value if index & half else value + values[index + half]
            for index, value in enumerate(values)
        ]
    return values


def _stage_unit(sums: Any, s_lane: Int32, unit: int, rotate: bool) -> None:
    """Write 32 rows of this lane's sums; `sums(index)` is sum `index` of that unit."""
    for eight in range(ROW_UNIT // 8):
        for odd in range(2):
            low, high = sums(4 * eight + odd), sums(4 * eight + 2 + odd)
            if rotate:
                low, high = low + high, low - high
            s_row = s_lane + (ROW_UNIT * unit + 8 * eight + odd) * _PITCH
            gpu.store_shared_floats(s_row, [low])
            gpu.store_shared_floats(s_row + _HALF_BYTES, [high])


def _lane_row(s_sums: Int32, warp: Int32, lane: Int32) -> Int32:
    """Address of the 64 channels that this lane reads."""
    return s_sums + (_WARP_ROWS * warp + (lane & (_HALF_LANES - 1))) * _PITCH + (lane >> 4) * _HALF_BYTES


def _reads(rows: Int32, first_row: Int32, warp: Int32, key: GemmKey) -> Boolean:
    """Whether a warp has rows of a pass."""
    return Boolean(rows > first_row) & Boolean(warp < key.pass_rows // _WARP_ROWS)


def _read_row(s_row: Int32) -> list[Float32]:
    return [value for first in range(0, _HALF_CHANNELS, 4) for value in gpu.load_shared_floats(s_row + first * 4, 4)]


def _run_place(run: int, index: int) -> int:
    """Where channel `index` of run `run` lies among a lane's 64 values: channel 16 run + 8 h + index."""
    return 32 * (index & 1) + 4 * run + (index >> 1)


def _scaled(values: list[Float32], s_factors: Int32, s_addends: Int32 | None = None) -> list[Float32]:
    """A lane's 64 values times those of a table, plus those of another."""
    result = list(values)
    for run in range(_RUNS):
        for first in range(0, _RUN, 4):
            offset = (_RUN * run + first) * 4
            factors = gpu.load_shared_floats(s_factors + offset, 4)
            addends = [] if s_addends is None else gpu.load_shared_floats(s_addends + offset, 4)
            for index, factor in enumerate(factors):
                place = _run_place(run, first + index)
                product = (
                    values[place] * factor if s_addends is None else gpu.fma(values[place], factor, addends[index])
                )
                result[place] = product
    return result


def _rotated_in(values: list[Float32], lane: Int32) -> list[Float32]:
    """The unnormalised transform of a row over this lane and the one 16 away."""
    sign = Float32(1 - 2 * (lane >> 4))
    return [gpu.fma(value, sign, gpu.lane_swap(value, _HALF_LANES)) for value in _butterfly(values, 6)]


def _store_image(
    values: list[Float32], out: Int64, block: Int32, slot: Int32, out_rows: Int32, half: Int32, live: Boolean
) -> None:
    """Write a lane's 64 values, rounded to fp16, to the pieces of its half of both panels of a row."""
    swizzle = slot & (ROW_GROUP - 1)
    for panel in range(2):
        g_row = out + (Int64(2 * block + panel) * Int64(out_rows) + Int64(slot)) * PANEL_ROW_BYTES
        for i in range(4):
            pairs = [[values[_run_place(4 * panel + t, 2 * i + j)] for j in range(2)] for t in range(4)]
            words = [gpu.pack_halves(*pair) for pair in pairs]
            gpu.store_words(g_row + Int64(((2 * i + half) ^ swizzle) * PIECE_BYTES), words, live)


def _channels(values: list[Float32], run: int) -> list[Float32]:
    """The eight channels of a run, in order."""
    return [values[_run_place(run, index)] for index in range(_RUN)]


def _stage_halves(values: list[Float32], s_row: Int32, half: Int32) -> None:
    """Write a lane's 64 values as fp16, in order, over the fp32 row that its lane and the one 16 away have read."""
    for run in range(_RUNS):
        channels = _channels(values, run)
        words = [gpu.pack_halves(channels[index], channels[index + 1]) for index in range(0, _RUN, 2)]
        gpu.store_shared_words(s_row + (16 * run + _RUN * half) * 2, words)


def _write_halves(s_rows: Int32, s_routes: Int32, g_block: Int64, row_bytes: Int64, live: Int32, lane: Int32) -> None:
    """Write a warp's first `live` of 16 fp16 rows of a block from shared memory, two whole rows at a time.

    Rows go to the rows of their routes; `g_block` is the block's place in the first of them.
    """
    piece = (lane & 15) * PIECE_BYTES
    for first in range(0, _WARP_ROWS, 2):
        row = first + (lane >> 4)
        inside = cutlass.min(row, live - 1)
        route = gpu.load_shared_int(s_routes + inside * 4)
        words = primitives.load_shared(s_rows + row * _PITCH + piece, 4)
        g_row = g_block + Int64(route) * row_bytes + Int64(piece)
        gpu.store_words(g_row, words, Boolean(row < live))


def _store_floats(values: list[Float32], g_row: Int64, half: Int32, live: Boolean) -> None:
    """Write a lane's 64 values to a row of fp32 values."""
    for run in range(_RUNS):
        channels = _channels(values, run)
        for first in (0, 4):
            g_four = g_row + Int64((16 * run + _RUN * half + first) * 4)
            gpu.store_floats(g_four, channels[first : first + 4], live)


@cute.jit
def fill_tables(s_info: Int32, s_tables: Int32, args: GemmArguments, key: Constexpr):
    """Widen a block's fp16 tables to fp32 in the order of lanes; scales also take the norm of a rotation.

    The order is channel 16 run + 8 half + index at place 64 half + 8 run + index.  A bias that is not given is zeros.
    """
    thread, _, _ = _this_thread()
    pair = thread & (_TABLE_THREADS - 1)
    place = 64 * ((pair >> 2) & 1) + 8 * (pair >> 3) + 2 * (pair & 3)
    scales = key.scale_tables
    for index in cutlass.range_constexpr(key.tables):
        if (thread >> 6) == (index & 3):
            word = primitives.load_shared(s_info + info_table(index) + pair * 4, 1)[0]
            values = gpu.floats_from(word, "float16")
            if cutlass.const_expr(index < scales):
                values = [value * Float32(_NORM) for value in values]
            else:
                given = Int32((args.first_bias, args.last_bias)[index - scales] != 0)
                values = [wgmma.pick(given, Float32(0.0), value) for value in values]
            gpu.store_shared_floats(s_tables + (index * _TABLE_BYTES + place * 4), values)


def _weighted(values: list[Float32], weight: Float32, dtype: str) -> list[Float32]:
    """Values times a route's weight, rounded to a dtype."""
    return [rounding.rounded(value * weight, dtype) for value in values]


@cute.jit
def _add_row(values: list[Float32], g_row: Int64, half: Int32, live: Boolean, has_vector: Constexpr):
    """Add a lane's 64 values to a row of fp32 values, in no order among threads."""
    if live:
        for run in cutlass.range_constexpr(_RUNS):
            for first in cutlass.range_constexpr(0, _RUN, 4):
                four = [values[_run_place(run, first + index)] for index in range(4)]
                rounding.accumulate(g_row + Int64((16 * run + _RUN * half + first) * 4), four, has_vector)


@cute.jit
def finish_rows(
    r_sums: cute.Tensor, s_sums: Int32, s_tables: Int32, s_info: Int32, args: GemmArguments, key: Constexpr
):
    """Write a tile to the routes' rows, rotated out for `down`; or add it, weighted, to the tokens' rows."""
    _, warp, lane = _this_thread()
    place = gpu.load_shared_ints(s_info, 4)
    block = gpu.load_shared_int(s_info + 16)
    rows = place[2]
    half = lane >> 4
    rotated = key.epilogue != "rows"
    s_lane = s_sums + _staged_lane(warp, lane)
    s_scales = s_tables + half * _HALF_BYTES
    for part in cutlass.range_constexpr(key.passes):
        if rows > key.pass_rows * part:
            _stage_part(r_sums, s_lane, rows, part, rotated, key)
            _sync()
            first_row = key.pass_rows * part + _WARP_ROWS * warp
            if _reads(rows, first_row, warp, key):
                row = first_row + (lane & (_HALF_LANES - 1))
                live = Boolean(row < rows)
                s_routes = s_info + INFO_HEADER_BYTES
                route = gpu.load_shared_int(s_routes + cutlass.min(row, rows - 1) * 4)
                s_row = _lane_row(s_sums, warp, lane)
                weight = args.factor
                if cutlass.const_expr(key.epilogue == "add"):
                    g_weight = args.weights + Int64(route * VALUE_BYTES[key.weight_dtype])
                    weight = rounding.load_value(g_weight, key.weight_dtype) * args.factor
                values = _read_row(s_row)
                if cutlass.const_expr(rotated):
                    s_bias = s_scales + _TABLE_BYTES if key.biased[0] else None
                    values = _scaled(_butterfly(values, 6), s_scales, s_bias)
                if cutlass.const_expr(key.epilogue == "add"):
                    g_block = (Int64(route // args.top_k) * Int64(args.blocks) + Int64(block)) * (BLOCK_CHANNELS * 4)
                    terms = _weighted(values, weight, key.out_dtype)
                    _add_row(terms, args.out + g_block, half, live, key.arch != "sm_80")
                elif cutlass.const_expr(key.out_dtype == "float32"):
                    g_block = (Int64(route) * Int64(args.blocks) + Int64(block)) * (BLOCK_CHANNELS * 4)
                    _store_floats(values, args.out + g_block, half, live)
                else:
                    cute.arch.sync_warp()  # both lanes of a row have read it
                    s_halves = s_row - half * _HALF_BYTES
                    _stage_halves(values, s_halves, half)
                    cute.arch.sync_warp()
                    s_first = s_sums + _WARP_ROWS * _PITCH * warp
                    g_block = args.out + Int64(block) * _BLOCK_BYTES
                    row_bytes = Int64(args.blocks) * _BLOCK_BYTES
                    _write_halves(s_first, s_routes + first_row * 4, g_block, row_bytes, rows - first_row, lane)
            _sync()


@cute.jit
def keep_gate(r_sums: cute.Tensor, s_sums: Int32, s_tables: Int32, s_info: Int32, stash: Int64, key: Constexpr):
    """Rotate out, scale and keep the rows of gate, whose sums these are, for `finish_join` of the same threads.

    They wait in memory as fp32: held in registers, they would meet those of up, and neither would fit.
    """
    thread, warp, lane = _this_thread()
    rows = gpu.load_shared_int(s_info + 8)
    s_row = _lane_row(s_sums, warp, lane)
    s_table = s_tables + (lane >> 4) * _HALF_BYTES
    for part in cutlass.range_constexpr(key.passes):
        if rows > key.pass_rows * part:
            _stage_part(r_sums, _staged_lane(warp, lane) + s_sums, rows, part, True, key)
            _sync()
            if _reads(rows, key.pass_rows * part + _WARP_ROWS * warp, warp, key):
                values = _rotated_out(s_row, s_table, 0, key)
                for four in cutlass.range_constexpr(_HALF_CHANNELS // 4):
                    gpu.store_floats(_kept(stash, thread, part, four, key), values[4 * four : 4 * four + 4])
            _sync()


def _kept(stash: Int64, thread: Int32, part: int, four: int, key: GemmKey) -> Int64:
    """Where a thread keeps four of the 64 values of its row of a pass."""
    return stash + Int64(((_HALF_CHANNELS // 4) * part + four) * (2 * key.pass_rows) + thread) * _STASH_BYTES


def _stage_part(r_sums: Any, s_lane: Int32, rows: Int32, part: int, rotate: bool, key: GemmKey) -> None:
    """Write this lane's sums of a pass, those of 32-row units that have rows."""
    units = min(key.pass_rows, key.block_rows - key.pass_rows * part) // ROW_UNIT
    for unit in range(units):
        first = key.pass_rows // 2 * part + 16 * unit
        _stage_live(r_sums, s_lane, rows, key.pass_rows * part, first, unit, rotate)


@cute.jit
def _stage_live(
    r_sums: cute.Tensor, s_lane: Int32, rows: Int32, first_row: Constexpr, first: Constexpr, unit: Constexpr,
    rotate: Constexpr,
):  # fmt: skip
    if rows > first_row + ROW_UNIT * unit:
        _stage_unit(lambda index: r_sums[first + index], s_lane, unit, rotate)


@cute.jit
def finish_join(
    r_sums: cute.Tensor,
    s_sums: Int32,
    s_tables: Int32,
    s_info: Int32,
    stash: Int64,
    args: GemmArguments,
    key: Constexpr,
):
    """Rotate out, scale, activate, scale, rotate in, and write the image of the down projection's rows.

    The sums are those of up; with a gate, its rows were kept by `keep_gate`.
    """
    thread, warp, lane = _this_thread()
    place = gpu.load_shared_ints(s_info, 4)
    block = gpu.load_shared_int(s_info + 16)
    rows = place[2]
    half = lane >> 4
    s_row = _lane_row(s_sums, warp, lane)
    s_table = s_tables + half * _HALF_BYTES
    for part in cutlass.range_constexpr(key.passes):
        if rows > key.pass_rows * part:
            first_row = key.pass_rows * part + _WARP_ROWS * warp
            row = first_row + (lane & (_HALF_LANES - 1))
            _stage_part(r_sums, _staged_lane(warp, lane) + s_sums, rows, part, True, key)
            _sync()
            if _reads(rows, first_row, warp, key):
                up = _rotated_out(s_row, s_table, key.linears - 1, key)
                joined = _joined(up, stash, thread, part, key)
                values = _rotated_in(_scaled(joined, s_table + key.linears * _TABLE_BYTES), lane)
                live = Boolean(row < rows)
                _store_image(values, args.out, block, place[3] + row, args.out_rows, half, live)
            _sync()


def _joined(up: list[Float32], stash: Int64, thread: Int32, part: int, key: GemmKey) -> list[Float32]:
    """A lane's row of up activated; with a gate, by what it kept of its row of that."""
    if not key.gated:
        return moe_math.activate(None, up, key.activation)
    joined: list[Float32] = []
    for first in range(0, _HALF_CHANNELS, _JOINED_AT_ONCE):
        gate = [
            value
            for four in range(first // 4, (first + _JOINED_AT_ONCE) // 4)
            for value in gpu.load_floats(_kept(stash, thread, part, four, key), 4, bypass_l1=True)
        ]
        joined += moe_math.activate(gate, up[first : first + _JOINED_AT_ONCE], key.activation)
    return joined


def _rotated_out(s_row: Int32, s_table: Int32, linear: int, key: GemmKey) -> list[Float32]:
    """The staged row of a linear rotated out, scaled and biased."""
    s_bias = s_table + (key.scale_tables + linear) * _TABLE_BYTES if any(key.biased) else None
    return _scaled(_butterfly(_read_row(s_row), 6), s_table + linear * _TABLE_BYTES, s_bias)
