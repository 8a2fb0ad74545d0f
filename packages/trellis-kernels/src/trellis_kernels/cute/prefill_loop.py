"""Owns the inner loops of the many-row GEMM: one warp that feeds stages of shared memory, and warpgroups that multiply.

It must not know routing beyond row blocks, nor what becomes of the sums.

A stage holds one step: 64 input channels of up to 128 rows, in the swizzle of `wgmma`, and the codes of both
warpgroups.  A warpgroup decodes its codes to the register operand A of `wgmma`, 64 output channels at a time, and the
rows are operand B, so that every weight is decoded once for a whole row block and never written anywhere.  The
products of one column run while the next is decoded.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32

from trellis_format.rates import TILE, Rate
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import primitives, wgmma
from trellis_kernels.cute.codebooks import get_device_codebook
from trellis_kernels.cute.prefill_key import BLOCK_ROWS_MOST
from trellis_kernels.cute.prefill_share import (
    BLOCK_CHANNELS,
    PANEL_ROW_BYTES,
    ROW_GROUP,
    STEP_TILE_ROWS,
    QuarterShare,
    quarter_share,
)
from trellis_kernels.cute.window import cut_windows

__all__ = ["CONSUMER_WARPS", "accumulate", "lane_codes", "produce"]

CONSUMER_WARPS = 8
"""Warps of both warpgroups; each arrives once at a stage's barrier when it has done with it."""

_COLUMNS = 2
_FRAGMENTS = 4
_PAIRED_COLUMNS = 96  # from here on the products of both columns are issued together
_FRAGMENT_UNITS = 2  # 16-byte units of a row's 32 bytes that one fragment meets
_DESCRIPTOR_BYTES = 16
_BLOCK_TILES = BLOCK_CHANNELS // TILE
_ENTRY_BYTES = 16


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def lane_codes(share: QuarterShare, warp: Int32, lane: Int32) -> Int32:
    """Bytes from the start of a block's codes in a stage to this lane's words; `warp` is that of the warpgroup."""
    tiles = warp * (2 * share.rate.tile_bytes)
    return tiles + (lane & 3) * share.row_pitch + (lane >> 2) * (share.words * 4)


def load_column(s_codes: Int32, s_before: Int32, share: QuarterShare, column: int) -> list[Uint32 | None]:
    """The words that hold one column's windows, counted backwards from the last of the share; None for the others.

    `s_before` is the word before the share on its ring.  Each column loads its own, because a column's loads stay
    behind the products of the one before, and so do the registers that its decoding takes.
    """
    needed = share.column_words(column)
    backwards: list[Uint32 | None] = [None] * (share.words + 1)
    for first in range(0, share.words, share.load_words):
        places = range(first, first + share.load_words)
        if not any(share.words - 1 - place in needed for place in places):
            continue
        loaded = primitives.load_shared(s_codes + first * 4, share.load_words)
        for place, word in zip(places, loaded, strict=True):
            backwards[share.words - 1 - place] = word
    if share.words in needed:
        backwards[share.words] = primitives.load_shared(s_before, 1)[0]
    return backwards


def decode_fragment(
    words: list[Uint32 | None], share: QuarterShare, column: int, index: int, codebook: str
) -> list[Uint32]:
    """Words counted backwards from the last of the share to one A fragment of a column."""
    first = 32 * column + 8 * index
    cuts = share.cuts[first : first + 8]
    twice = cut_windows(words, cuts, funnel_right=primitives.funnel_right, permute=primitives.permute_bytes)
    law = get_device_codebook(codebook)
    pairs = [law.decode_pair(twice[2 * p], twice[2 * p + 1]) for p in range(4)]
    # pairs lie as (k, n), (k + 8, n), (k, n + 8), (k + 8, n + 8); the operand wants both n before the next k
    return [pairs[0], pairs[2], pairs[1], pairs[3]]


def step_batches(columns: int) -> list[list[tuple[int, int]]]:
    """The products of a step, (column of the share, fragment) each, in batches that are issued together."""
    if columns >= _PAIRED_COLUMNS:
        return [[(column, index) for column in range(_COLUMNS)] for index in range(_FRAGMENTS)]
    return [[(column, index)] for column in range(_COLUMNS) for index in range(_FRAGMENTS)]


def _decode_batch(
    batch: list[tuple[int, int]],
    words: dict[int, list[Uint32 | None]],
    s_codes: Int32,
    before: Int32,
    share: QuarterShare,
    codebook: str,
) -> list[list[Uint32]]:
    """The fragments of a batch; `words` keeps what was loaded of this step, by column."""
    fragments = []
    for column, index in batch:
        if column not in words:
            words[column] = load_column(s_codes, s_codes + before, share, column)
        fragments.append(decode_fragment(words[column], share, column, index, codebook))
    return fragments


def _issue_batch(
    r_sums: Any, batch: list[tuple[int, int]], fragments: list[list[Uint32]], rows: Int32, columns: int
) -> None:
    """Start the products of a batch; a group of its own."""
    cute.nvgpu.warpgroup.fence()
    used = {column for column, _ in batch}
    sums = {column: [r_sums[column, index] for index in range(columns // 2)] for column in used}
    for (column, index), fragment in zip(batch, fragments, strict=True):
        sums[column] = wgmma.multiply(sums[column], fragment, rows + _FRAGMENT_UNITS * index, columns)
    for column in used:
        for index in range(columns // 2):
            r_sums[column, index] = sums[column][index]
    cute.nvgpu.warpgroup.commit_group()


def _pin_sums(r_sums: Any, columns: int) -> None:
    """Let nothing read the sums before this point."""
    for column in range(_COLUMNS):
        sums = wgmma.pin([r_sums[column, index] for index in range(columns // 2)])
        for index in range(columns // 2):
            r_sums[column, index] = sums[index]


def _keep_batch(r_batch: Any, fragments: list[list[Uint32]]) -> None:
    for index, fragment in enumerate(fragments):
        for part in range(4):
            r_batch[index, part] = fragment[part]


@cute.jit
def accumulate(
    r_sums: cute.Tensor,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_codes: Int32,
    position: Int32,
    steps: Int32,
    lane: Int32,
    half_bits: Constexpr,
    columns: Constexpr,
    key: Constexpr,
):
    """Add all steps of a row block to the sums `[2, 64]`; `position` counts steps since the kernel's start.

    `s_rows` is the row tile of stage 0, `s_codes` this lane's words in it.  Each batch of products is followed by the
    decoding of the next, because a warp that issues products one after the other stands still for them.
    """
    share = quarter_share(Rate(half_bits))
    # bytes from this lane's words to the last word of the quarter before, on the same ring of four quarters
    before = share.words * 4 * (((lane >> 2) - 1 & 3) - ((lane >> 2) & 3)) + (share.words - 1) * 4
    stages = key.stages
    first_arrival = Boolean(lane == 0)
    stage = position % stages
    phase = (position // stages) & 1
    previous = stage
    batches = step_batches(columns)
    size = len(batches[0])
    r_batch = cute.make_rmem_tensor(cute.make_layout((size, 4), stride=(4, 1)), Uint32)
    cute.arch.mbarrier_wait(barriers + stage, phase)
    s_step = s_codes + stage * key.code_stage_bytes
    _keep_batch(r_batch, _decode_batch(batches[0], {}, s_step, before, share, key.codebook))
    for step in cutlass.range(steps, unroll=1):
        rows = wgmma.descriptor_word(s_rows + stage * key.row_stage_bytes)
        s_step = s_codes + stage * key.code_stage_bytes
        fragments = [[r_batch[index, part] for part in range(4)] for index in range(size)]
        words: dict[int, list[Uint32 | None]] = {}
        for place in cutlass.range_constexpr(len(batches)):
            _issue_batch(r_sums, batches[place], fragments, rows, columns)
            if cutlass.const_expr(place + 1 < len(batches)):
                fragments = _decode_batch(batches[place + 1], words, s_step, before, share, key.codebook)
            else:
                previous = stage
                # the last step looks at its own stage once more rather than at one that may never be filled
                more = Int32(step + 1 < steps)
                wraps = more * Int32(stage == stages - 1)
                stage = (stage + more) * (1 - wraps)
                phase = phase ^ wraps
                s_next = s_codes + stage * key.code_stage_bytes
                cute.arch.mbarrier_wait(barriers + stage, phase)
                _keep_batch(r_batch, _decode_batch(batches[0], {}, s_next, before, share, key.codebook))
            cute.nvgpu.warpgroup.wait_group(1)
            if cutlass.const_expr(place == 0):
                # all products of the step before are done, so its stage may be filled again
                wgmma.arrive((barriers + (stages + previous)).toint(), first_arrival & Boolean(step > 0))
    cute.nvgpu.warpgroup.wait_group(0)
    wgmma.arrive((barriers + (stages + previous)).toint(), first_arrival)
    _pin_sums(r_sums, columns)


@cute.jit
def produce(
    words: Int64,
    first_descriptors: Int64,
    last_descriptors: Int64,
    first_image: Int64,
    last_image: Int64,
    entries: Int64,
    tiles: Int32,
    first_tile: Int32,
    tile_stride: Int32,
    column_blocks: Int32,
    blocks: Int32,
    steps: Int32,
    image_rows: Int32,
    barriers: cute.Pointer,
    s_rows: Int32,
    s_codes: Int32,
    lane: Int32,
    key: Constexpr,
):
    """Fill stages for every tile of this thread block, in order; run by one warp."""
    shares = [quarter_share(rate) for rate in key.rates]
    stages = key.stages
    # lanes 0..7 copy codes: four tile rows of each warpgroup; lanes 8 and 9 copy the rows of an image
    group = (lane >> 2) & 1
    tile_row = lane & 3
    tile_bytes = shares[0].rate.tile_bytes + group * (shares[1].rate.tile_bytes - shares[0].rate.tile_bytes)
    s_target = s_codes + group * shares[0].step_bytes + tile_row * (8 * tile_bytes + _gap(shares[0]))
    stage_pitch = Int32(key.code_stage_bytes)
    if lane >= 8:
        s_target = s_rows + (lane - 8) * (BLOCK_ROWS_MOST * PANEL_ROW_BYTES)
        stage_pitch = Int32(key.row_stage_bytes)
    code_bytes = 8 * tile_bytes
    is_code = Boolean(lane < 8)
    is_copy = Boolean(lane < 8 + key.images)
    row_pitch = Int64(blocks * _BLOCK_TILES) * Int64(tile_bytes)
    position = Int32(0)
    for tile in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
        entry = gpu.load_ints(entries + Int64(tile // column_blocks) * _ENTRY_BYTES, 4)
        column_block = tile % column_blocks
        if cutlass.const_expr(key.gated):
            block = column_block
            descriptors = last_descriptors if group == 1 else first_descriptors
        else:
            block = cutlass.min(2 * column_block + group, blocks - 1)
            descriptors = first_descriptors
        first_word = gpu.load_longs(descriptors + Int64(entry[0]) * _DESCRIPTOR_BYTES, 1)[0]
        row_bytes = (entry[2] + (ROW_GROUP - 1)) // ROW_GROUP * (ROW_GROUP * PANEL_ROW_BYTES)
        image = last_image if lane == 9 else first_image
        g_source = image + Int64(entry[3]) * PANEL_ROW_BYTES
        g_advance = Int64(image_rows) * PANEL_ROW_BYTES
        nbytes = row_bytes
        if is_code:
            g_source = words + first_word * 4 + Int64(tile_row) * row_pitch + Int64(block * _BLOCK_TILES * tile_bytes)
            g_advance = STEP_TILE_ROWS * row_pitch
            nbytes = code_bytes
        total = key.images * row_bytes + STEP_TILE_ROWS * (shares[0].row_bytes + shares[1].row_bytes)
        for _ in cutlass.range(steps, unroll=1):
            stage = position % stages
            phase = (position // stages) & 1
            cute.arch.mbarrier_wait(barriers + (stages + stage), phase ^ 1)
            s_full = (barriers + stage).toint()
            wgmma.arrive_expecting(s_full, total, Boolean(lane == 0))
            cute.arch.sync_warp()
            wgmma.copy_bulk(s_target + stage * stage_pitch, g_source, nbytes, s_full, is_copy)
            g_source = g_source + g_advance
            position = position + 1


def _gap(share: QuarterShare) -> int:
    return share.row_pitch - share.row_bytes
