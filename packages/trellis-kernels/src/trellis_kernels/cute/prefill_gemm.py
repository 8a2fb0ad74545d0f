"""Owns the many-row grouped GEMM over trellis codes: its kernel and the arguments of its launch.

It must not know tensors, nor how rows were packed beyond their blocks.

A persistent thread block takes tiles of one row block by 128 output channels: two warpgroups of 64 each, and four warps
that feed them.  Where gate and up meet, a tile is multiplied by both in turn, and the sums of gate wait in memory that
is the thread block's own, for the registers hold the sums of one.  Tiles of one row block follow each other, so that
the blocks that run at once share rows and, across row blocks of one expert, codes in the L2.  A row's sums add input
channels in one fixed order whatever the block it lies in, so its bits depend on its own input and expert alone.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.rates import Rate
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import wgmma
from trellis_kernels.cute.prefill_epilogue import fill_tables, finish_join, finish_rows, stash_sums
from trellis_kernels.cute.prefill_key import (
    BLOCK_ROWS_MOST,
    FEEDER_WARPS,
    ROW_UNIT,
    STASH_NBYTES,
    THREAD_BLOCKS_MOST,
    PrefillGemmKey,
)
from trellis_kernels.cute.prefill_loop import CONSUMER_WARPS, accumulate, feed, feed_info, lane_column
from trellis_kernels.cute.prefill_share import column_share

__all__ = ["build"]

_THREADS = (CONSUMER_WARPS + FEEDER_WARPS) * 32
_FEEDER_REGISTERS = 40
_CONSUMER_REGISTERS = 232
_ENTRY_BYTES = 16
_TILE_ALIGNMENT = 1024
_UNITS = BLOCK_ROWS_MOST // ROW_UNIT
_STASH_BYTES = STASH_NBYTES // THREAD_BLOCKS_MOST


@cute.jit
def _accumulate_block(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_codes: Int32,
    group: Int32,
    group_warp: Int32,
    position: Int32,
    steps: Int32,
    rows: Int32,
    lane: Int32,
    half_bits: Constexpr,
    key: Constexpr,
):
    """Multiply a row block by one linear, with the fewest columns that hold its rows."""
    offset, before = lane_column(column_share(Rate(half_bits)), group, group_warp, lane)
    units = (rows + (ROW_UNIT - 1)) // ROW_UNIT
    if cutlass.const_expr(not key.overwrites):
        r_sums.fill(0.0)
    for count in cutlass.range_constexpr(1, _UNITS + 1):
        if units == count:
            accumulate(
                r_sums, barriers, s_rows, s_codes + offset, before, group, position, steps, lane, half_bits,
                count * ROW_UNIT, key,
            )  # fmt: skip


@cute.kernel
def _gemm_kernel(
    words: Int64,
    first_descriptors: Int64,
    last_descriptors: Int64,
    first_image: Int64,
    last_image: Int64,
    entries: Int64,
    entry_count: Int64,
    routes: Int64,
    out: Int64,
    first_scales: Int64,
    last_scales: Int64,
    input_scales: Int64,
    first_bias: Int64,
    last_bias: Int64,
    stash: Int64,
    weights: Int64,
    image_rows: Int32,
    out_rows: Int32,
    scale_pitch: Int32,
    input_scale_pitch: Int32,
    bias_pitch: Int32,
    steps: Int32,
    blocks: Int32,
    top_k: Int32,
    factor: Float32,
    key: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    first_tile, _, _ = cute.arch.block_idx()
    tile_stride, _, _ = cute.arch.grid_dim()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    stages = key.stages
    shared = cutlass.memory.SmemAllocator()
    s_rows = shared.allocate_array(Uint32, stages * key.row_stage_bytes // 4, byte_alignment=_TILE_ALIGNMENT).toint()
    s_codes = shared.allocate_array(Uint32, stages * key.code_stage_bytes // 4, byte_alignment=128).toint()
    s_sums = shared.allocate_array(Uint32, key.sum_bytes // 4, byte_alignment=128).toint()
    s_infos = shared.allocate_array(Uint32, 2 * key.info_bytes // 4, byte_alignment=128).toint()
    s_tables = s_infos
    if cutlass.const_expr(key.tables):
        s_tables = shared.allocate_array(Uint32, key.table_bytes // 4, byte_alignment=128).toint()
    barriers = shared.allocate_array(Int64, 2 * stages, byte_alignment=16)
    info_barriers = shared.allocate_array(Int64, 4, byte_alignment=16)
    if thread == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(barriers + stage, 1)
            cute.arch.mbarrier_init(barriers + (stages + stage), CONSUMER_WARPS)
        for buffer in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(info_barriers + buffer, 1)
            cute.arch.mbarrier_init(info_barriers + (2 + buffer), CONSUMER_WARPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tiles = gpu.load_ints(entry_count, 1)[0] * blocks
    position = Int32(0)
    turn = Int32(0)
    if warp >= CONSUMER_WARPS:
        cute.arch.setmaxregister_decrease(_FEEDER_REGISTERS)
        feeder = warp - CONSUMER_WARPS
        for tile in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
            entry = gpu.load_ints(entries + Int64(tile // blocks) * _ENTRY_BYTES, 4)
            block = tile % blocks
            if feeder == 0:
                buffer = turn & 1
                cute.arch.mbarrier_wait(info_barriers + (2 + buffer), ((turn >> 1) & 1) ^ 1)
                feed_info(
                    entry, block,
                    _tables(first_scales, last_scales, input_scales, first_bias, last_bias, scale_pitch,
                            input_scale_pitch, bias_pitch, key),
                    routes, s_infos + buffer * key.info_bytes, (info_barriers + buffer).toint(), lane, key,
                )  # fmt: skip
            turn = turn + 1
            feed(
                words, first_descriptors, first_image, entry[0], entry[2], entry[3], block, blocks, position, steps,
                image_rows, barriers, s_rows, s_codes, feeder, lane, key.half_bits[0], key,
            )  # fmt: skip
            position = position + steps
            if cutlass.const_expr(key.gated):
                feed(
                    words, last_descriptors, last_image, entry[0], entry[2], entry[3], block, blocks, position, steps,
                    image_rows, barriers, s_rows, s_codes, feeder, lane, key.half_bits[1], key,
                )  # fmt: skip
                position = position + steps
    else:
        cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
        group = warp >> 2
        group_warp = warp & 3
        g_stash = stash + Int64(first_tile) * _STASH_BYTES
        r_sums = cute.make_rmem_tensor(cute.make_layout((BLOCK_ROWS_MOST // 2,)), Float32)
        for _ in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
            buffer = turn & 1
            s_info = s_infos + buffer * key.info_bytes
            cute.arch.mbarrier_wait(info_barriers + buffer, (turn >> 1) & 1)
            rows = gpu.load_shared_int(s_info + 8)
            if cutlass.const_expr(key.linears == 2 and key.half_bits[0] == key.half_bits[1]):
                for linear in cutlass.range(2, unroll=1):
                    _accumulate_block(
                        r_sums, barriers, s_rows, s_codes, group, group_warp, position, steps, rows, lane,
                        key.half_bits[0], key,
                    )  # fmt: skip
                    position = position + steps
                    if linear == 0:
                        stash_sums(r_sums, g_stash, wgmma.thread_index(), rows, key)
            else:
                for linear in cutlass.range_constexpr(key.linears):
                    _accumulate_block(
                        r_sums, barriers, s_rows, s_codes, group, group_warp, position, steps, rows, lane,
                        key.half_bits[linear], key,
                    )  # fmt: skip
                    position = position + steps
                    if cutlass.const_expr(linear + 1 < key.linears):
                        stash_sums(r_sums, g_stash, wgmma.thread_index(), rows, key)
            fill_tables(s_info, s_tables, first_bias, last_bias, key)
            if cutlass.const_expr(key.epilogue == "join"):
                finish_join(r_sums, s_sums, s_tables, s_info, g_stash, out, out_rows, key)
            else:
                finish_rows(r_sums, s_sums, s_tables, s_info, out, blocks, weights, top_k, factor, key)
            wgmma.arrive((info_barriers + (2 + buffer)).toint(), cutlass.Boolean(lane == 0))
            turn = turn + 1


def _tables(
    first_scales: Int64, last_scales: Int64, input_scales: Int64, first_bias: Int64, last_bias: Int64,
    scale_pitch: Int32, input_scale_pitch: Int32, bias_pitch: Int32, key: PrefillGemmKey,
) -> list[tuple[Int64, Int32]]:  # fmt: skip
    """The tables of a tile in the order of its information."""
    scales = [(first_scales, scale_pitch), (last_scales, scale_pitch)][: key.linears]
    inputs = [(input_scales, input_scale_pitch)] if key.epilogue == "join" else []
    biases = [(first_bias, bias_pitch), (last_bias, bias_pitch)][: key.linears]
    return (scales + inputs + biases)[: key.tables]


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _gemm_host(
    words: Int64,
    first_descriptors: Int64,
    last_descriptors: Int64,
    first_image: Int64,
    last_image: Int64,
    entries: Int64,
    entry_count: Int64,
    routes: Int64,
    out: Int64,
    first_scales: Int64,
    last_scales: Int64,
    input_scales: Int64,
    first_bias: Int64,
    last_bias: Int64,
    stash: Int64,
    weights: Int64,
    image_rows: Int32,
    out_rows: Int32,
    scale_pitch: Int32,
    input_scale_pitch: Int32,
    bias_pitch: Int32,
    steps: Int32,
    blocks: Int32,
    top_k: Int32,
    thread_blocks: Int32,
    factor: Float32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    _gemm_kernel(
        words, first_descriptors, last_descriptors, first_image, last_image, entries, entry_count, routes, out,
        first_scales, last_scales, input_scales, first_bias, last_bias, stash, weights, image_rows, out_rows,
        scale_pitch, input_scale_pitch, bias_pitch, steps, blocks, top_k, factor, key,
    ).launch(grid=[thread_blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip


def build(key: PrefillGemmKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (16 addresses, 9 numbers, factor, stream) in the order of the host function above.
    """
    addresses = [Int64(0)] * 16
    numbers = [Int32(1)] * 9
    return cute.compile(_gemm_host, *addresses, *numbers, Float32(1.0), key, cuda.CUstream(0), options=options)
