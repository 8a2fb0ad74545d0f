"""Holds the column share to the tile law: every weight once, in the place where the rows expect it."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import unpack_states
from trellis_kernels.cute.prefill_share import (
    BLOCK_CHANNELS,
    PANEL_CHANNELS,
    PIECES,
    ROW_GROUP,
    channel_order,
    column_share,
    output_channel,
    piece_place,
)
from trellis_kernels.cute.window import cut_windows

LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3


def funnel_right(low, high, shift):
    wide = low.astype(np.uint64) | (np.uint64(0) if high is None else high.astype(np.uint64) << np.uint64(32))
    return (wide >> np.uint64(shift)).astype(np.uint32)


def permute(low, high, selector):
    source = np.stack([low, high], axis=-1).astype("<u4").view(np.uint8)
    chosen = [source[..., selector >> 4 * nibble & 7] for nibble in range(4)]
    return np.stack(chosen, axis=-1).copy().view("<u4")[..., 0]


def column_words(codes: np.ndarray, rate: Rate, warp: int, column: int) -> list[np.ndarray]:
    """What the lanes of a warp hold of `[4, 8, 16*K] int16`, counted backwards from the end of their column."""
    share = column_share(rate)
    ring = codes.reshape(4, -1).view(np.uint32)
    base = warp * 2 * rate.tile_words32 + G * share.quarter_words
    quarter = [ring[T, base + index] for index in range(share.quarter_words)]
    before = quarter[-1][((G & 4) | ((G - 1) & 3)) * 4 + T]
    words = [*reversed(quarter), before]
    shift = 16 * rate.half_bits * (1 - column)
    first, bits = divmod(shift, 32)
    if not bits:
        return words[first : first + share.words + 1]
    return [funnel_right(words[place], words[place + 1], bits) for place in range(first, first + share.words)]


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_windows_of_a_column_are_the_states_of_half_a_quarter_tile(rate: Rate) -> None:
    codes = np.random.default_rng(rate.half_bits).integers(-(2**15), 2**15, (4, 8, rate.tile_words16), dtype=np.int16)
    states = unpack_states(codes, rate).reshape(4, 8, 4, 2, 32)
    share = column_share(rate)
    for warp, column in np.ndindex(4, 2):
        words = column_words(codes, rate, warp, column)
        cut = cut_windows(words, share.cuts, funnel_right=funnel_right, permute=permute)
        expected = states[T, 2 * warp + G // 4, G % 4, column]
        np.testing.assert_array_equal(np.stack([word & 0xFFFF for word in cut], axis=-1), expected)
        np.testing.assert_array_equal(np.stack([word >> 16 for word in cut], axis=-1), expected)


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_lanes_meet_in_few_banks(rate: Rate) -> None:
    """A load takes at most twice the passes that its bytes need, four times where quarters are 32 or 64 bytes."""
    share = column_share(rate)
    words = (T * share.row_pitch + G * share.quarter_words * 4) // 4
    at_once = 32 // share.load_words
    worst = max(
        np.bincount((words[first : first + at_once, None] + np.arange(share.load_words)).reshape(-1) % 32).max()
        for first in range(0, 32, at_once)
    )
    assert worst <= (4 if rate.bits in (4, 8) else 2)


def test_copies_are_multiples_of_sixteen_bytes() -> None:
    for rate in ALL_RATES:
        share = column_share(rate)
        assert share.row_bytes % 16 == 0
        assert share.row_pitch % 16 == 0
        assert share.column_bytes % (4 * share.load_words) == 0
        assert share.row_bytes == BLOCK_CHANNELS // 16 * rate.tile_bytes


def test_output_channels_cover_a_block_once() -> None:
    channels = [output_channel(w, g, c, h) for w in range(4) for g in range(8) for c in range(2) for h in range(2)]
    assert sorted(channels) == list(range(BLOCK_CHANNELS))


def test_channel_order_is_that_of_the_fragments() -> None:
    order = channel_order()
    assert sorted(order) == list(range(PANEL_CHANNELS))
    for i in range(4):
        for lane in range(4):
            for z in range(2):
                first = 16 * i + 8 * z + 2 * lane
                assert list(order[first : first + 2]) == [16 * lane + 2 * i + 8 * z, 16 * lane + 2 * i + 8 * z + 1]


def test_the_swizzle_keeps_a_row_and_spreads_a_group() -> None:
    for row in range(2 * ROW_GROUP):
        assert sorted(piece_place(piece, row) for piece in range(PIECES)) == list(range(PIECES))
    for piece in range(PIECES):
        assert len({piece_place(piece, row) for row in range(ROW_GROUP)}) == ROW_GROUP
