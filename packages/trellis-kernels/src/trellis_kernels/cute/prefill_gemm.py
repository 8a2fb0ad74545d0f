"""Owns the many-row grouped GEMM over trellis codes: its kernel and the arguments of its launch.

It must not know tensors, nor how rows were packed beyond their blocks.

A persistent thread block takes tiles of one row block by 256 output channels: two warpgroups of 128 each, and one warp
that feeds them.  Tiles of one row block follow each other, so that the blocks that run at once share rows and, across
row blocks of one expert, codes in the L2.  A row's sums add input channels in one fixed order whatever the block it
lies in, so its bits depend on its own input and expert alone.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import wgmma
from trellis_kernels.cute.prefill_epilogue import finish_join, finish_rows
from trellis_kernels.cute.prefill_key import ROW_UNIT, PrefillGemmKey
from trellis_kernels.cute.prefill_loop import CONSUMER_WARPS, accumulate, lane_codes, produce
from trellis_kernels.cute.prefill_share import quarter_share

__all__ = ["build"]

_THREADS = (CONSUMER_WARPS + 4) * 32  # registers are handed over between whole warpgroups, so the feeding warp has one
_FEEDER_REGISTERS = 24
_CONSUMER_REGISTERS = 240
_ENTRY_BYTES = 16
_TILE_ALIGNMENT = 1024


@cute.jit
def _accumulate_block(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_codes: Int32,
    position: Int32,
    steps: Int32,
    rows: Int32,
    lane: Int32,
    half_bits: Constexpr,
    key: Constexpr,
):
    """Multiply a row block with the fewest columns that hold its rows."""
    units = (rows + (ROW_UNIT - 1)) // ROW_UNIT
    r_sums.fill(0.0)
    if units == 4:
        accumulate(r_sums, barriers, s_rows, s_codes, position, steps, lane, half_bits, 128, key)
    elif units == 3:
        accumulate(r_sums, barriers, s_rows, s_codes, position, steps, lane, half_bits, 96, key)
    elif units == 2:
        accumulate(r_sums, barriers, s_rows, s_codes, position, steps, lane, half_bits, 64, key)
    else:
        accumulate(r_sums, barriers, s_rows, s_codes, position, steps, lane, half_bits, 32, key)


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
    image_rows: Int32,
    out_rows: Int32,
    scale_pitch: Int32,
    input_scale_pitch: Int32,
    bias_pitch: Int32,
    steps: Int32,
    blocks: Int32,
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
    s_work = shared.allocate_array(Uint32, 2 * (key.sum_bytes + key.table_bytes) // 4, byte_alignment=128).toint()
    barriers = shared.allocate_array(Int64, 2 * stages, byte_alignment=16)
    if thread == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(barriers + stage, 1)
            cute.arch.mbarrier_init(barriers + (stages + stage), CONSUMER_WARPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    column_blocks = blocks if cutlass.const_expr(key.gated) else (blocks + 1) // 2
    tiles = gpu.load_ints(entry_count, 1)[0] * column_blocks
    if warp >= CONSUMER_WARPS:
        cute.arch.setmaxregister_decrease(_FEEDER_REGISTERS)
        if warp == CONSUMER_WARPS:
            produce(
                words, first_descriptors, last_descriptors, first_image, last_image, entries, tiles, first_tile,
                tile_stride, column_blocks, blocks, steps, image_rows, barriers, s_rows, s_codes, lane, key,
            )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
        group = warp >> 2
        group_warp = warp & 3
        r_sums = cute.make_rmem_tensor(cute.make_layout((2, 64), stride=(64, 1)), Float32)
        shares = [quarter_share(rate) for rate in key.rates]
        s_group_codes = s_codes + group * shares[0].step_bytes
        s_group_rows = s_rows
        if cutlass.const_expr(key.images == 2):
            s_group_rows = s_rows + group * (key.row_stage_bytes // 2)
        position = Int32(0)
        for tile in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
            rows = gpu.load_ints(entries + (Int64(tile // column_blocks) * _ENTRY_BYTES + 8), 1)[0]
            if cutlass.const_expr(key.half_bits[0] == key.half_bits[-1]):  # noqa: SIM114  # one is known at trace time
                s_lane = s_group_codes + lane_codes(shares[0], group_warp, lane)
                _accumulate_block(
                    r_sums, barriers, s_group_rows, s_lane, position, steps, rows, lane, key.half_bits[0], key
                )
            elif group == 0:
                s_lane = s_group_codes + lane_codes(shares[0], group_warp, lane)
                _accumulate_block(
                    r_sums, barriers, s_group_rows, s_lane, position, steps, rows, lane, key.half_bits[0], key
                )
            else:
                s_lane = s_group_codes + lane_codes(shares[1], group_warp, lane)
                _accumulate_block(
                    r_sums, barriers, s_group_rows, s_lane, position, steps, rows, lane, key.half_bits[1], key
                )
            position = position + steps
            # found again, so that the loop above need not keep it in registers
            same_tile = wgmma.again(tile)
            entry = gpu.load_ints(entries + Int64(same_tile // column_blocks) * _ENTRY_BYTES, 4)
            column_block = same_tile % column_blocks
            if cutlass.const_expr(key.epilogue == "join"):
                finish_join(
                    r_sums, s_work, out, first_scales, last_scales, input_scales, first_bias, last_bias,
                    entry[0], entry[3], entry[2], column_block, blocks, out_rows, scale_pitch, input_scale_pitch,
                    bias_pitch, key,
                )  # fmt: skip
            else:
                finish_rows(
                    r_sums, s_work, out, routes, first_scales, first_bias, entry[0], entry[1], entry[2],
                    column_block, blocks, scale_pitch, bias_pitch, key,
                )  # fmt: skip


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
    image_rows: Int32,
    out_rows: Int32,
    scale_pitch: Int32,
    input_scale_pitch: Int32,
    bias_pitch: Int32,
    steps: Int32,
    blocks: Int32,
    thread_blocks: Int32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    _gemm_kernel(
        words, first_descriptors, last_descriptors, first_image, last_image, entries, entry_count, routes, out,
        first_scales, last_scales, input_scales, first_bias, last_bias, image_rows, out_rows, scale_pitch,
        input_scale_pitch, bias_pitch, steps, blocks, key,
    ).launch(grid=[thread_blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip


def build(key: PrefillGemmKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (14 addresses, 8 numbers, stream) in the order of the host function above.
    """
    addresses = [Int64(0)] * 14
    numbers = [Int32(1)] * 8
    return cute.compile(_gemm_host, *addresses, *numbers, key, cuda.CUstream(0), options=options)
