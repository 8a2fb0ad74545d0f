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
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.prefill_arguments import GemmArguments, tile_tables
from trellis_kernels.cute.prefill_epilogue import fill_tables, finish_join, finish_rows, keep_gate
from trellis_kernels.cute.prefill_key import CODE_UNIT, ENTRY_CODES, ENTRY_WORDS, FEEDER_WARPS, ROW_UNIT, PrefillGemmKey
from trellis_kernels.cute.prefill_loop import (
    CONSUMER_WARPS,
    EMPTY_ARRIVALS,
    FULL_ARRIVALS,
    accumulate,
    accumulate_halves,
    feed,
    feed_info,
    fill_law,
    lane_column,
)
from trellis_kernels.cute.prefill_share import column_share

__all__ = ["build"]

_THREADS = (CONSUMER_WARPS + FEEDER_WARPS) * 32
_ENTRY_READ = 6  # words
_TILE_ALIGNMENT = 1024


@cute.jit
def _accumulate_block(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_codes: Int32,
    s_law: Int32,
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
    for count in cutlass.range_constexpr(1, key.block_rows // ROW_UNIT + 1):
        if units == count:
            (accumulate_halves if key.halves else accumulate)(
                r_sums, barriers, s_rows, s_codes + offset, s_law, before, group, position, steps, lane, half_bits,
                count * ROW_UNIT, key,
            )  # fmt: skip


@cute.kernel
def _gemm_kernel(key: Constexpr, args: GemmArguments):
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
    s_law = s_tables
    if cutlass.const_expr(key.law_bytes):
        s_law = shared.allocate_array(Uint32, key.law_bytes // 4, byte_alignment=128).toint()
    barriers = shared.allocate_array(Int64, 2 * stages, byte_alignment=16)
    info_barriers = shared.allocate_array(Int64, 4, byte_alignment=16)
    if thread == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(barriers + stage, FULL_ARRIVALS)
            cute.arch.mbarrier_init(barriers + (stages + stage), EMPTY_ARRIVALS)
        for buffer in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(info_barriers + buffer, 1)
            cute.arch.mbarrier_init(info_barriers + (2 + buffer), CONSUMER_WARPS)
        cute.arch.mbarrier_init_fence()
    fill_law(args.law, s_law, thread, _THREADS, key)
    cute.arch.sync_threads()
    tiles = gpu.load_ints(args.entry_count, 1)[0] * args.blocks
    position = Int32(0)
    turn = Int32(0)
    if warp >= CONSUMER_WARPS:
        cute.arch.setmaxregister_decrease(key.registers[1])
        feeder = warp - CONSUMER_WARPS
        r_next = cute.make_rmem_tensor(cute.make_layout((_ENTRY_READ,)), Int32)  # of the tile after this one
        if first_tile < tiles:
            _load_entry(r_next, args.entries, first_tile // args.blocks, args.code_place)
        for tile in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
            entry = [r_next[index] for index in range(_ENTRY_READ)]
            following = cutlass.min(tile + tile_stride, tiles - 1)
            _load_entry(r_next, args.entries, following // args.blocks, args.code_place)
            block = tile % args.blocks
            if feeder == 0:
                buffer = turn & 1
                cute.arch.mbarrier_wait(info_barriers + (2 + buffer), ((turn >> 1) & 1) ^ 1)
                feed_info(
                    entry[:4], block, tile_tables(args, key), args.routes, s_infos + buffer * key.info_bytes,
                    (info_barriers + buffer).toint(), lane, key,
                )  # fmt: skip
            turn = turn + 1
            for linear in cutlass.range_constexpr(key.linears):
                feed(
                    args.words + Int64(entry[ENTRY_CODES + linear]) * CODE_UNIT,
                    (args.first_image, args.last_image)[linear], entry[2], entry[3], block, args.blocks, position,
                    args.steps, args.image_rows, barriers, s_rows, s_codes, feeder, lane, key.half_bits[linear], key,
                )  # fmt: skip
                position = position + args.steps
    else:
        cute.arch.setmaxregister_increase(key.registers[0])
        group = warp >> 2
        group_warp = warp & 3
        g_stash = args.stash + Int64(first_tile) * key.stash_bytes
        r_sums = cute.make_rmem_tensor(cute.make_layout((key.block_rows // 2,)), Float32)
        for _ in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
            buffer = turn & 1
            s_info = s_infos + buffer * key.info_bytes
            cute.arch.mbarrier_wait(info_barriers + buffer, (turn >> 1) & 1)
            rows = gpu.load_shared_int(s_info + 8)
            fill_tables(s_info, s_tables, args, key)
            if cutlass.const_expr(key.linears == 2 and key.half_bits[0] == key.half_bits[1]):
                for linear in cutlass.range(2, unroll=1):
                    _accumulate_block(
                        r_sums, barriers, s_rows, s_codes, s_law, group, group_warp, position, args.steps, rows, lane,
                        key.half_bits[0], key,
                    )  # fmt: skip
                    position = position + args.steps
                    if linear == 0:
                        keep_gate(r_sums, s_sums, s_tables, s_info, g_stash, key)
            else:
                for linear in cutlass.range_constexpr(key.linears):
                    _accumulate_block(
                        r_sums, barriers, s_rows, s_codes, s_law, group, group_warp, position, args.steps, rows, lane,
                        key.half_bits[linear], key,
                    )  # fmt: skip
                    position = position + args.steps
                    if cutlass.const_expr(linear + 1 < key.linears):
                        keep_gate(r_sums, s_sums, s_tables, s_info, g_stash, key)
            if cutlass.const_expr(key.epilogue == "join"):
                finish_join(r_sums, s_sums, s_tables, s_info, g_stash, args, key)
            else:
                finish_rows(r_sums, s_sums, s_tables, s_info, args, key)
            wgmma.arrive((info_barriers + (2 + buffer)).toint(), cutlass.Boolean(lane == 0))
            turn = turn + 1


def _load_entry(r_entry: Any, entries: Int64, index: Int32, code_place: Int32) -> None:
    """Read a row block, and where the codes of its linears start."""
    g_entry = entries + Int64(index) * (4 * ENTRY_WORDS)
    for place, value in enumerate([*gpu.load_ints(g_entry, 4), *gpu.load_ints(g_entry + Int64(code_place) * 4, 2)]):
        r_entry[place] = value


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _gemm_host(args: GemmArguments, key: Constexpr, stream: cuda.CUstream):
    _gemm_kernel(key, args).launch(
        grid=[args.thread_blocks, 1, 1],
        block=[_THREADS, 1, 1],
        stream=stream,
        min_blocks_per_mp=key.resident,
        preferred_smem_carveout=100 if key.resident > 1 else None,
    )


def build(key: PrefillGemmKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `GemmArguments` and a stream.
    """
    return cute.compile(_gemm_host, blank(GemmArguments), key, cuda.CUstream(0), options=options)
