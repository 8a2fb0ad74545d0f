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
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS
from trellis_kernels.cute.window import LANES, cut_windows

__all__ = [
    "CONSUMER_WARPS",
    "EMPTY_ARRIVALS",
    "FULL_ARRIVALS",
    "accumulate",
    "accumulate_halves",
    "feed",
    "feed_info",
    "fill_law",
    "lane_column",
]

CONSUMER_WARPS = 8
"""Warps of both warpgroups."""
EMPTY_ARRIVALS = CONSUMER_WARPS * LANES
"""Arrivals that give a stage back: every lane's, since each has read codes of it; racecheck sees no order in a warp."""
FULL_ARRIVALS = LANES + 1
"""Arrivals that fill a stage: those of a warp's copies of codes, and that of the rows."""
_FRAGMENTS = 4
_HALF = _FRAGMENTS // 2
_FRAGMENT_UNITS = 2  # 16-byte units of a row's 32 bytes that one fragment meets
_BLOCK_TILES = BLOCK_CHANNELS // TILE
_ENTRY_BYTES = 16
_HALF_WORD = 16
_PIECE = 16  # bytes
_ROW_LANES = LANES // STEP_TILE_ROWS


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


def decode_fragment(
    words: list[Uint32], share: ColumnShare, index: int, codebook: str, s_law: Int32, lane: Int32 | None = None
) -> list[Uint32]:
    """Words counted backwards from the end of a column to its A fragment `index`.

    `s_law` is the address of the codebook's table, where its law takes one.  Given its lane, the whole warp decodes by
    products where its target can; see `DeviceCodebook.finish_eight`.
    """
    cuts = share.cuts[8 * index : 8 * index + 8]
    twice = cut_windows(words, cuts, funnel_right=primitives.funnel_right, permute=primitives.permute_bytes)
    tabled = TABLE_CODEBOOKS.get(codebook)
    if tabled is not None:
        pairs = [tabled.decode_pair(twice[2 * p], twice[2 * p + 1], share.rate, s_law) for p in range(4)]
    elif lane is not None:
        law = get_device_codebook(codebook)
        pairs = law.finish_eight([law.hash(state) for state in twice], lane)
    else:
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
def fill_law(law: Int64, s_law: Int32, thread: Int32, threads: Constexpr, key: Constexpr):
    """Copy the codebook's table, if its law takes one, to shared memory; seen after a barrier of the thread block."""
    for piece in cutlass.range(thread, key.law_bytes // _PIECE, threads, unroll=1):
        gpu.store_shared_words(s_law + piece * _PIECE, gpu.load_words(law + Int64(piece) * _PIECE, 4))


@cute.jit
def accumulate(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_column: Int32,
    s_law: Int32,
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
    own = lane if key.by_products else None
    stage = position % stages
    phase = (position // stages) & 1
    r_even = cute.make_rmem_tensor(cute.make_layout((_FRAGMENTS, 4), stride=(4, 1)), Uint32)
    r_odd = cute.make_rmem_tensor(cute.make_layout((_FRAGMENTS, 4), stride=(4, 1)), Uint32)
    cute.arch.mbarrier_wait(barriers + stage, phase)
    _decode_step(r_even, s_column + stage * key.code_stage_bytes, before, s_law, share, group, own, key.codebook)
    for pair in cutlass.range(steps // 2, unroll=1):
        for odd in cutlass.range_constexpr(2):
            rows = wgmma.descriptor_word(s_rows + stage * key.row_stage_bytes)
            adds = Int32(pair > 0) if key.overwrites and odd == 0 else Int32(1)
            _multiply(r_sums, _kept((r_even, r_odd)[odd], _FRAGMENTS), rows, columns, adds)
            previous = stage
            wraps = Int32(stage == stages - 1)
            stage = (stage + 1) * (1 - wraps)
            phase = phase ^ wraps
            if cutlass.const_expr(odd == 0):
                cute.arch.mbarrier_wait(barriers + stage, phase)
                _decode_step(
                    r_odd, s_column + stage * key.code_stage_bytes, before, s_law, share, group, own, key.codebook
                )
                # a branch that the assembler moves no decoding across: it would decode after it has waited for products
                cute.arch.mbarrier_wait(barriers + stage, phase)
            elif pair + 1 < steps // 2:  # else the next stage may never be filled
                cute.arch.mbarrier_wait(barriers + stage, phase)
                _decode_step(
                    r_even, s_column + stage * key.code_stage_bytes, before, s_law, share, group, own, key.codebook
                )
            cute.nvgpu.warpgroup.wait_group(0)
            cute.arch.sync_warp()
            wgmma.arrive((barriers + (stages + previous)).toint())
    _pin_sums(r_sums, columns)


@cute.jit
def accumulate_halves(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_column: Int32,
    s_law: Int32,
    before: Int32,
    group: Int32,
    position: Int32,
    steps: Int32,
    lane: Int32,
    half_bits: Constexpr,
    columns: Constexpr,
    key: Constexpr,
):
    """As `accumulate`, by halves of a step, whose fragments take half the registers.

    The products of a half run while the next half is decoded.
    """
    share = column_share(Rate(half_bits))
    stages = key.stages
    own = lane if key.by_products else None
    stage = position % stages
    phase = (position // stages) & 1
    r_first = cute.make_rmem_tensor(cute.make_layout((_HALF, 4), stride=(4, 1)), Uint32)
    r_second = cute.make_rmem_tensor(cute.make_layout((_HALF, 4), stride=(4, 1)), Uint32)
    r_words = cute.make_rmem_tensor(cute.make_layout((share.read_words,)), Uint32)
    cute.arch.mbarrier_wait(barriers + stage, phase)
    _keep_words(r_words, load_words(s_column + stage * key.code_stage_bytes, before, share, group))
    _decode_half(r_first, r_words, 0, s_law, share, own, key.codebook)
    for step in cutlass.range(steps, unroll=1):
        rows = wgmma.descriptor_word(s_rows + stage * key.row_stage_bytes)
        adds = Int32(step > 0) if key.overwrites else Int32(1)
        _multiply(r_sums, _kept(r_first, _HALF), rows, columns, adds)
        _decode_half(r_second, r_words, _HALF, s_law, share, own, key.codebook)
        # a branch that the assembler moves no decoding across: it would decode after it has waited for products
        cute.arch.mbarrier_wait(barriers + stage, phase)
        cute.nvgpu.warpgroup.wait_group(0)
        _multiply(r_sums, _kept(r_second, _HALF), rows + _FRAGMENT_UNITS * _HALF, columns, Int32(1))
        previous = stage
        wraps = Int32(stage == stages - 1)
        stage = (stage + 1) * (1 - wraps)
        phase = phase ^ wraps
        if step + 1 < steps:  # else the next stage may never be filled
            cute.arch.mbarrier_wait(barriers + stage, phase)
            _keep_words(r_words, load_words(s_column + stage * key.code_stage_bytes, before, share, group))
            _decode_half(r_first, r_words, 0, s_law, share, own, key.codebook)
        cute.nvgpu.warpgroup.wait_group(0)
        cute.arch.sync_warp()
        wgmma.arrive((barriers + (stages + previous)).toint())
    _pin_sums(r_sums, columns)


def _keep_words(r_words: Any, words: list[Uint32]) -> None:
    for index, word in enumerate(words):
        r_words[index] = word


def _decode_half(
    r_fragments: Any, r_words: Any, first: int, s_law: Int32, share: ColumnShare, own: Int32 | None, codebook: str
) -> None:
    """Decode two fragments of this lane's column from `first` on."""
    words = [r_words[index] for index in range(share.read_words)]
    for index in range(_HALF):
        for part, value in enumerate(decode_fragment(words, share, first + index, codebook, s_law, own)):
            r_fragments[index, part] = value


def _decode_step(
    r_fragments: Any, s_column: Int32, before: Int32, s_law: Int32, share: ColumnShare, group: Int32, own: Int32 | None,
    codebook: str,
) -> None:  # fmt: skip
    """Decode this lane's column of a step to the four fragments `[4, 4]`."""
    words = load_words(s_column, before, share, group)
    for index in range(_FRAGMENTS):
        for part, value in enumerate(decode_fragment(words, share, index, codebook, s_law, own)):
            r_fragments[index, part] = value


def _kept(r_fragments: Any, count: int) -> list[list[Uint32]]:
    return [[r_fragments[index, part] for part in range(4)] for index in range(count)]


@cute.jit
def feed(
    codes: Int64,
    image: Int64,
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

    Eight lanes copy a tile row of codes, by pieces of 16 bytes; the rows are one bulk copy.  Bulk copies of the tile
    rows too, four of less than a KiB, would take longer than the decoding of a step.
    """
    share = column_share(Rate(half_bits))
    stages = key.stages
    feeders = key.feeders
    row_bytes = (rows + (ROW_GROUP - 1)) // ROW_GROUP * (ROW_GROUP * PANEL_ROW_BYTES)
    code_pitch = Int64(blocks) * Int64(share.row_bytes)
    row_pitch = Int64(image_rows) * PANEL_ROW_BYTES
    row, piece = lane // _ROW_LANES, lane & (_ROW_LANES - 1)
    first_step = (feeder - position) & (feeders - 1)
    first_row = Int64(first_step * STEP_TILE_ROWS + row)
    g_codes = codes + first_row * code_pitch + Int64(block * share.row_bytes + piece * _PIECE)
    g_rows = image + Int64(image_row) * PANEL_ROW_BYTES + Int64(first_step) * row_pitch
    s_piece = s_codes + row * share.row_pitch + piece * _PIECE
    for step in cutlass.range(first_step, steps * Int32(feeder < feeders), feeders, unroll=1):
        place = position + step
        stage = place % stages
        phase = (place // stages) & 1
        cute.arch.mbarrier_wait(barriers + (stages + stage), phase ^ 1)
        s_full = (barriers + stage).toint()
        wgmma.arrive_expecting(s_full, row_bytes, Boolean(lane == 0))
        wgmma.copy_bulk(s_rows + stage * key.row_stage_bytes, g_rows, row_bytes, s_full, Boolean(lane == 0))
        s_target = s_piece + stage * key.code_stage_bytes
        for first in cutlass.range_constexpr(0, share.row_bytes, _ROW_LANES * _PIECE):
            wgmma.copy_where(s_target + first, g_codes + first, None)
        wgmma.arrive_copied(s_full)
        g_codes = g_codes + feeders * STEP_TILE_ROWS * code_pitch
        g_rows = g_rows + feeders * row_pitch


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
    wgmma.store_where(s_info, entry, Boolean(lane == 0))
    wgmma.store_where(s_info + 16, [block] * 4, Boolean(lane == 0))
    wgmma.arrive_expecting(s_full, total, Boolean(lane == 0))
    cute.arch.sync_warp()
    wgmma.copy_bulk(s_target, g_source, nbytes, s_full, Boolean(lane <= len(tables)) & Boolean(nbytes > 0))
