"""Owns the many-row grouped GEMM over trellis codes for every target: its kernel and the arguments of its launch.

It must not know tensors, nor how rows were packed beyond their blocks.

The tiles, shares, row blocks and epilogues are those of `prefill_gemm`; what differs is that `mma.sync` multiplies and
that every thread copies.  Eight warps share a block of 128 output channels by the columns of `prefill_share`, so that a
warp's decoded fragment is a whole m16k16 operand and its sums lie as those of a warp of `wgmma`.  Steps alternate
between two buffers.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.rates import TILE, Rate
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import primitives, wgmma
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.prefill_arguments import GemmArguments, tile_tables
from trellis_kernels.cute.prefill_epilogue import fill_tables, finish_join, finish_rows, keep_gate
from trellis_kernels.cute.prefill_key import (
    CODE_UNIT,
    ENTRY_WORDS,
    INFO_HEADER_BYTES,
    ROW_UNIT,
    PrefillMmaKey,
    info_table,
)
from trellis_kernels.cute.prefill_loop import decode_fragment, fill_law, lane_column, load_words
from trellis_kernels.cute.prefill_share import (
    BLOCK_CHANNELS,
    PANEL_ROW_BYTES,
    PIECE_BYTES,
    STEP_TILE_ROWS,
    ColumnShare,
    column_share,
)

__all__ = ["build"]

_THREADS = 256
_FRAGMENTS = 4
_COLUMNS = 8  # rows of a product
_BLOCK_TILES = BLOCK_CHANNELS // TILE


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def fragment_offset(lane: Int32, index: int, half: int) -> Int32:
    """Bytes from the row that is a lane's column of a product to its word of fragment `index`, input half 0 or 1.

    Rows are swizzled by their index modulo 8, which is the lane's column.
    """
    return ((2 * index + half) ^ (lane >> 2)) * PIECE_BYTES + (lane & 3) * 4


def _copy_step(
    g_rows: Int64, g_codes: Int64, code_pitch: Int64, s_rows: Int32, s_codes: Int32, row_bytes: Int32, thread: Int32,
    share: ColumnShare, key: PrefillMmaKey,
) -> None:  # fmt: skip
    """Start copying a step: the rows of a panel, and four tile rows of codes; a group of its own."""
    span = _THREADS * PIECE_BYTES
    for first in range(0, key.row_stage_bytes, span):
        offset = thread * PIECE_BYTES + first
        wgmma.copy_where(s_rows + offset, g_rows + Int64(offset), Boolean(offset < row_bytes))
    pieces = share.row_bytes // PIECE_BYTES
    for first in range(0, STEP_TILE_ROWS * pieces, _THREADS):
        piece = thread + first
        row, inside = piece // pieces, piece % pieces * PIECE_BYTES
        s_piece = s_codes + row * share.row_pitch + inside
        g_piece = g_codes + Int64(row) * code_pitch + Int64(inside)
        live = None if first + _THREADS <= STEP_TILE_ROWS * pieces else Boolean(piece < STEP_TILE_ROWS * pieces)
        wgmma.copy_where(s_piece, g_piece, live)
    gpu.commit_copies()


@cute.jit
def _accumulate(
    r_sums: cute.Tensor,
    g_rows: Int64,
    g_codes: Int64,
    s_rows: Int32,
    s_codes: Int32,
    s_law: Int32,
    image_rows: Int32,
    blocks: Int32,
    steps: Int32,
    rows: Int32,
    thread: Int32,
    half_bits: Constexpr,
    key: Constexpr,
):
    """Multiply a row block by one linear; every thread of the block."""
    share = column_share(Rate(half_bits))
    lane = thread & 31
    warp = thread >> 5
    group = warp >> 2
    column, before = lane_column(share, group, warp & 3, lane)
    row_bytes = (rows + 7) // 8 * (8 * PANEL_ROW_BYTES)
    code_pitch = Int64(blocks) * Int64(share.row_bytes)
    row_advance = Int64(image_rows) * PANEL_ROW_BYTES
    r_sums.fill(0.0)
    cute.arch.sync_threads()  # the tile before has done with the buffers
    _copy_step(g_rows, g_codes, code_pitch, s_rows, s_codes, row_bytes, thread, share, key)
    for step in cutlass.range(steps, unroll=1):
        buffer = step & 1
        gpu.wait_for_copies(0)
        cute.arch.sync_threads()
        if step + 1 < steps:
            following = Int64(step + 1)
            _copy_step(
                g_rows + following * row_advance, g_codes + following * (STEP_TILE_ROWS * code_pitch), code_pitch,
                s_rows + (1 - buffer) * key.row_stage_bytes, s_codes + (1 - buffer) * key.code_stage_bytes, row_bytes,
                thread, share, key,
            )  # fmt: skip
        words = load_words(s_codes + buffer * key.code_stage_bytes + column, before, share, group)
        s_row = s_rows + buffer * key.row_stage_bytes + (lane >> 2) * PANEL_ROW_BYTES
        for index in cutlass.range_constexpr(_FRAGMENTS):
            fragment = decode_fragment(words, share, index, key.codebook, s_law)
            places = [s_row + fragment_offset(lane, index, half) for half in range(2)]
            for unit in cutlass.range_constexpr(key.block_rows // ROW_UNIT):
                if rows > ROW_UNIT * unit:
                    for eight in cutlass.range_constexpr(4 * unit, 4 * unit + 4):
                        offset = eight * _COLUMNS * PANEL_ROW_BYTES
                        b = [primitives.load_shared(place + offset, 1)[0] for place in places]
                        sums = gpu.multiply_halves(fragment, b, [r_sums[4 * eight + part] for part in range(4)])
                        for part in cutlass.range_constexpr(4):
                            r_sums[4 * eight + part] = sums[part]


@cute.jit
def _load_info(
    expert: Int32,
    slot: Int32,
    rows: Int32,
    image_row: Int32,
    block: Int32,
    args: GemmArguments,
    s_info: Int32,
    thread: Int32,
    key: Constexpr,
):
    """Fill a tile's information as `prefill_loop.feed_info` does."""
    if thread == 0:
        gpu.store_shared_words(s_info, [Uint32(value) for value in (expert, slot, rows, image_row)])
        gpu.store_shared_words(s_info + 16, [Uint32(block)])
    if cutlass.const_expr(key.has_routes):  # noqa: SIM102  # known at trace time, unlike the next
        if thread < rows:
            route = gpu.load_ints(args.routes + Int64(slot + thread) * 4, 1)[0]
            gpu.store_shared_int(s_info + INFO_HEADER_BYTES + thread * 4, route)
    tables = tile_tables(args, key)
    pair = thread & (BLOCK_CHANNELS // 2 - 1)
    for index in cutlass.range_constexpr(key.tables):
        table, pitch = tables[index]
        if Boolean((thread >> 6) == (index & 3)) & Boolean(table != 0):
            place = Int64(expert) * Int64(pitch) + Int64(block * BLOCK_CHANNELS + 2 * pair)
            gpu.store_shared_words(s_info + info_table(index) + pair * 4, gpu.load_words(table + place * 2, 1))


@cute.kernel
def _mma_kernel(key: Constexpr, args: GemmArguments):
    thread, _, _ = cute.arch.thread_idx()
    first_tile, _, _ = cute.arch.block_idx()
    tile_stride, _, _ = cute.arch.grid_dim()
    shared = cutlass.memory.SmemAllocator()
    s_rows = shared.allocate_array(Uint32, key.stages * key.row_stage_bytes // 4, byte_alignment=1024).toint()
    s_codes = shared.allocate_array(Uint32, key.stages * key.code_stage_bytes // 4, byte_alignment=128).toint()
    s_sums = shared.allocate_array(Uint32, key.sum_bytes // 4, byte_alignment=128).toint()
    s_info = shared.allocate_array(Uint32, key.info_bytes // 4, byte_alignment=128).toint()
    s_tables = s_info
    if cutlass.const_expr(key.tables):
        s_tables = shared.allocate_array(Uint32, key.table_bytes // 4, byte_alignment=128).toint()
    s_law = s_tables
    if cutlass.const_expr(key.law_bytes):
        s_law = shared.allocate_array(Uint32, key.law_bytes // 4, byte_alignment=128).toint()
    fill_law(args.law, s_law, thread, _THREADS, key)  # seen after the barrier before the first step
    g_stash = args.stash + Int64(first_tile) * key.stash_bytes
    r_sums = cute.make_rmem_tensor(cute.make_layout((key.block_rows // 2,)), Float32)
    tiles = gpu.load_ints(args.entry_count, 1)[0] * args.blocks
    for tile in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
        entry = gpu.load_ints(args.entries + Int64(tile // args.blocks) * (4 * ENTRY_WORDS), 4)
        expert, slot, rows, image_row = entry[0], entry[1], entry[2], entry[3]
        places = Int64(tile // args.blocks) * ENTRY_WORDS + Int64(args.code_place)
        codes = gpu.load_ints(args.entries + places * 4, 2)
        block = tile % args.blocks
        cute.arch.sync_threads()  # the tile before has done with its information
        _load_info(expert, slot, rows, image_row, block, args, s_info, thread, key)
        cute.arch.sync_threads()
        fill_tables(s_info, s_tables, args, key)
        for linear in cutlass.range_constexpr(key.linears):
            share = column_share(key.rates[linear])
            g_codes = args.words + Int64(codes[linear]) * CODE_UNIT + Int64(block) * share.row_bytes
            g_rows = (args.first_image, args.last_image)[linear] + Int64(image_row) * PANEL_ROW_BYTES
            _accumulate(
                r_sums, g_rows, g_codes, s_rows, s_codes, s_law, args.image_rows, args.blocks, args.steps, rows, thread,
                key.half_bits[linear], key,
            )  # fmt: skip
            if cutlass.const_expr(linear + 1 < key.linears):
                keep_gate(r_sums, s_sums, s_tables, s_info, g_stash, key)
        if cutlass.const_expr(key.epilogue == "join"):
            finish_join(r_sums, s_sums, s_tables, s_info, g_stash, args, key)
        else:
            finish_rows(r_sums, s_sums, s_tables, s_info, args, key)


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _mma_host(args: GemmArguments, key: Constexpr, stream: cuda.CUstream):
    _mma_kernel(key, args).launch(
        grid=[args.thread_blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
    )


def build(key: PrefillMmaKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `GemmArguments` and a stream.
    """
    return cute.compile(_mma_host, blank(GemmArguments), key, cuda.CUstream(0), options=options)
