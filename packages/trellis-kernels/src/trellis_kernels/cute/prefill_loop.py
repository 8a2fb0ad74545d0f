"""Owns the inner loops of the many-row GEMM: warps that feed stages of shared memory, and warpgroups that multiply.

It must not know routing beyond row blocks, nor what becomes of the sums.

A stage holds one step: 64 input channels of up to 256 rows, in the swizzle of `wgmma`, and the codes of a block of 128
output channels.  A warpgroup decodes half of them, 64 output channels, to the register operand A of `wgmma`, and the
rows are operand B, so that every weight is decoded once for a whole row block and never written anywhere.  A product
runs while the next fragment is decoded.

What a tile needs besides, its place, its scales and the routes of its rows, is fed in the same way, one tile ahead, so
that no multiplying warp waits for global memory.
"""

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32

from trellis_format.rates import TILE, Rate
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import primitives, wgmma
from trellis_kernels.cute.codebooks import get_device_codebook
from trellis_kernels.cute.prefill_key import INFO_HEADER_BYTES, INFO_TABLE_BYTES, GemmKey, info_table
from trellis_kernels.cute.prefill_share import (
    BLOCK_CHANNELS,
    PANEL_ROW_BYTES,
    ROW_GROUP,
    STEP_TILE_ROWS,
    ColumnShare,
    column_share,
)
from trellis_kernels.cute.window import cut_windows

__all__ = ["CONSUMER_WARPS", "accumulate", "feed", "feed_info", "lane_column"]

CONSUMER_WARPS = 8
"""Warps of both warpgroups; each arrives once at a stage's barrier when it has done with it."""
_FRAGMENTS = 4
_FRAGMENT_UNITS = 2  # 16-byte units of a row's 32 bytes that one fragment meets
_DESCRIPTOR_BYTES = 16
_BLOCK_TILES = BLOCK_CHANNELS // TILE
_ENTRY_BYTES = 16
_HALF_WORD = 16


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def lane_column(share: ColumnShare, group: Int32, warp: Int32, lane: Int32) -> tuple[Int32, Int32]:
    """Bytes from the start of a stage's codes to this lane's words, and from there to the word before them.

    The word before the first column is the last of the quarter before, on a tile's ring of four quarters.
    """
    g = lane >> 2
    quarter_bytes = share.quarter_words * 4
    first = warp * (2 * share.rate.tile_bytes) + (lane & 3) * share.row_pitch + g * quarter_bytes
    wrapped = quarter_bytes * (((g - 1) & 3) - (g & 3)) + quarter_bytes - 4
    return first + group * share.column_bytes, wrapped - group * (wrapped + 4)


def load_words(s_column: Int32, before: Int32, share: ColumnShare, group: Int32) -> list[Uint32]:
    """The words of this lane's column, counted backwards from its end."""
    words: list[Uint32] = []
    for first in range(0, share.words, share.load_words):
        words += primitives.load_shared(s_column + first * 4, share.load_words)
    backwards = [*reversed(words), primitives.load_shared(s_column + before, 1)[0]]
    if share.is_shifted:
        shift = Uint32(_HALF_WORD - group * _HALF_WORD)
        return [primitives.funnel_right(low, high, shift) for low, high in itertools.pairwise(backwards)]
    return backwards


def decode_fragment(words: list[Uint32], share: ColumnShare, index: int, codebook: str) -> list[Uint32]:
    """Words counted backwards from the end of a column to its A fragment `index`."""
    cuts = share.cuts[8 * index : 8 * index + 8]
    twice = cut_windows(words, cuts, funnel_right=primitives.funnel_right, permute=primitives.permute_bytes)
    law = get_device_codebook(codebook)
    pairs = [law.decode_pair(twice[2 * p], twice[2 * p + 1]) for p in range(4)]
    # pairs lie as (k, n), (k + 8, n), (k, n + 8), (k + 8, n + 8); the operand wants both n before the next k
    return [pairs[0], pairs[2], pairs[1], pairs[3]]


def _multiply(r_sums: Any, fragments: list[list[Uint32]], rows: Int32, columns: int, adds: Int32) -> None:
    """Start the products of a step, a group of their own; where `adds` is 0, the sums begin with them."""
    cute.nvgpu.warpgroup.fence()
    sums = [r_sums[index] for index in range(columns // 2)]
    for index, fragment in enumerate(fragments):
        sums = wgmma.multiply(sums, fragment, rows + _FRAGMENT_UNITS * index, columns, Int32(1) if index else adds)
    _keep_sums(r_sums, sums)
    cute.nvgpu.warpgroup.commit_group()


def _pin_sums(r_sums: Any, columns: int) -> None:
    """Let nothing read the sums before this point."""
    _keep_sums(r_sums, wgmma.pin([r_sums[index] for index in range(columns // 2)]))


def _keep_sums(r_sums: Any, sums: list[Any]) -> None:
    for index, value in enumerate(sums):
        r_sums[index] = value


@cute.jit
def accumulate(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_column: Int32,
    before: Int32,
    group: Int32,
    position: Int32,
    steps: Int32,
    lane: Int32,
    half_bits: Constexpr,
    columns: Constexpr,
    key: Constexpr,
):
    """Sum all steps of a row block to `[128]`; `position` counts steps since the kernel's start.

    `s_rows` is the row tile of stage 0, `s_column` this lane's words in it and `before` the way to the one before them.
    The products of a step run while the next step is decoded, into registers of its own; steps come in pairs, so that
    those change places without a move.
    """
    share = column_share(Rate(half_bits))
    stages = key.stages
    first_arrival = Boolean(lane == 0)
    stage = position % stages
    phase = (position // stages) & 1
    r_even = cute.make_rmem_tensor(cute.make_layout((_FRAGMENTS, 4), stride=(4, 1)), Uint32)
    r_odd = cute.make_rmem_tensor(cute.make_layout((_FRAGMENTS, 4), stride=(4, 1)), Uint32)
    cute.arch.mbarrier_wait(barriers + stage, phase)
    _decode_step(r_even, s_column + stage * key.code_stage_bytes, before, share, group, key.codebook)
    for pair in cutlass.range(steps // 2, unroll=1):
        for odd in cutlass.range_constexpr(2):
            rows = wgmma.descriptor_word(s_rows + stage * key.row_stage_bytes)
            adds = Int32(pair > 0) if key.overwrites and odd == 0 else Int32(1)
            _multiply(r_sums, _kept((r_even, r_odd)[odd]), rows, columns, adds)
            previous = stage
            wraps = Int32(stage == stages - 1)
            stage = (stage + 1) * (1 - wraps)
            phase = phase ^ wraps
            if cutlass.const_expr(odd == 0):
                cute.arch.mbarrier_wait(barriers + stage, phase)
                _decode_step(r_odd, s_column + stage * key.code_stage_bytes, before, share, group, key.codebook)
                # a branch that the assembler moves no decoding across: it would decode after it has waited for products
                cute.arch.mbarrier_wait(barriers + stage, phase)
            elif pair + 1 < steps // 2:  # else the next stage may never be filled
                cute.arch.mbarrier_wait(barriers + stage, phase)
                _decode_step(r_even, s_column + stage * key.code_stage_bytes, before, share, group, key.codebook)
            cute.nvgpu.warpgroup.wait_group(0)
            wgmma.arrive((barriers + (stages + previous)).toint(), first_arrival)
    _pin_sums(r_sums, columns)


def _decode_step(
    r_fragments: Any, s_column: Int32, before: Int32, share: ColumnShare, group: Int32, codebook: str
) -> None:
    """Decode this lane's column of a step to the four fragments `[4, 4]`."""
    words = load_words(s_column, before, share, group)
    for index in range(_FRAGMENTS):
        for part, value in enumerate(decode_fragment(words, share, index, codebook)):
            r_fragments[index, part] = value


def _kept(r_fragments: Any) -> list[list[Uint32]]:
    return [[r_fragments[index, part] for part in range(4)] for index in range(_FRAGMENTS)]


@cute.jit
def feed(
    words: Int64,
    descriptors: Int64,
    image: Int64,
    expert: Int32,
    rows: Int32,
    image_row: Int32,
    block: Int32,
    blocks: Int32,
    position: Int32,
    steps: Int32,
    image_rows: Int32,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_codes: Int32,
    feeder: Int32,
    lane: Int32,
    half_bits: Constexpr,
    key: Constexpr,
):
    """Fill every `key.feeders`th step of one linear of a tile; run by warp `feeder` of the feeding warpgroup.

    Lanes 0 to 3 copy the codes of a tile row each, lane 4 the rows.  One warp alone would start its copies, lane after
    lane, in as long as a step's products take.
    """
    share = column_share(Rate(half_bits))
    stages = key.stages
    first_word = gpu.load_longs(descriptors + Int64(expert) * _DESCRIPTOR_BYTES, 1)[0]
    row_bytes = (rows + (ROW_GROUP - 1)) // ROW_GROUP * (ROW_GROUP * PANEL_ROW_BYTES)
    code_pitch = Int64(blocks) * Int64(share.row_bytes)
    is_rows = Boolean(lane == STEP_TILE_ROWS)
    s_target = s_codes + lane * share.row_pitch
    stage_pitch = Int32(key.code_stage_bytes)
    g_source = words + first_word * 4 + Int64(lane) * code_pitch + Int64(block) * share.row_bytes
    g_advance = STEP_TILE_ROWS * code_pitch
    nbytes = Int32(share.row_bytes)
    if is_rows:
        s_target = s_rows
        stage_pitch = Int32(key.row_stage_bytes)
        g_source = image + Int64(image_row) * PANEL_ROW_BYTES
        g_advance = Int64(image_rows) * PANEL_ROW_BYTES
        nbytes = row_bytes
    feeders = key.feeders
    first_step = (feeder - position) & (feeders - 1)
    g_source = g_source + Int64(first_step) * g_advance
    for step in cutlass.range(first_step, steps * Int32(feeder < feeders), feeders, unroll=1):
        place = position + step
        stage = place % stages
        phase = (place // stages) & 1
        cute.arch.mbarrier_wait(barriers + (stages + stage), phase ^ 1)
        s_full = (barriers + stage).toint()
        wgmma.arrive_expecting(s_full, row_bytes + STEP_TILE_ROWS * share.row_bytes, Boolean(lane == 0))
        cute.arch.sync_warp()
        wgmma.copy_bulk(s_target + stage * stage_pitch, g_source, nbytes, s_full, Boolean(lane <= STEP_TILE_ROWS))
        g_source = g_source + feeders * g_advance


def feed_info(
    entry: list[Int32],
    block: Int32,
    tables: list[tuple[Int64, Int32]],
    routes: Int64,
    s_info: Int32,
    s_full: Int32,
    lane: Int32,
    key: GemmKey,
) -> None:
    """Fill a tile's information: its place by words, its routes and its tables by copies; run by one warp.

    A table is its address and the elements between its rows; one whose address is 0 is left as it was.
    """
    has_routes = Int32(int(key.has_routes))
    total = nbytes = (entry[2] + (ROW_GROUP - 1)) // ROW_GROUP * (ROW_GROUP * 4) * has_routes
    g_source = routes + Int64(entry[1]) * 4
    s_target = s_info + INFO_HEADER_BYTES
    for index, (table, pitch) in enumerate(tables):
        given = Int32(table != 0) * INFO_TABLE_BYTES
        total = total + given
        mine = Int32(lane == index + 1)
        address = table + (Int64(entry[0]) * Int64(pitch) + Int64(block * BLOCK_CHANNELS)) * 2
        g_source = g_source + Int64(mine) * (address - g_source)
        nbytes = nbytes + mine * (given - nbytes)
        s_target = s_target + mine * (s_info + info_table(index) - s_target)
    # every lane writes the same words
    gpu.store_shared_words(s_info, [Uint32(value) for value in entry])
    gpu.store_shared_words(s_info + 16, [Uint32(block)])
    wgmma.arrive_expecting(s_full, total, Boolean(lane == 0))
    cute.arch.sync_warp()
    wgmma.copy_bulk(s_target, g_source, nbytes, s_full, Boolean(lane <= len(tables)) & Boolean(nbytes > 0))
