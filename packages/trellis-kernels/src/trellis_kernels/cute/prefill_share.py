"""Owns which ring words a lane decodes in a step of the many-row GEMM, and where they lie.  It must not know `cutlass`.

Two warpgroups multiply a block of 128 output channels, which are 8 neighbouring tiles of a tile row; a step takes the 4
tile rows that hold 64 input channels.  Warp w of either owns tiles 2w and 2w + 1.  Lane 4g + t has quarter g % 4 of
tile 2w + g // 4 in tile row t: 64 ring positions, two output channels, each with its partner 8 above, over the 16 input
channels of the tile row.  Warpgroup c takes the first or the second of them, its column:

    output  32 w + 16 (g // 4) + 2 (g % 4) + c + 8 h                            column c and half h in {0, 1}
    input   16 t + 2 i + j + 8 z                                                fragment i, j and z

So a column of all lanes is an m64 operand, and its fragments i = 0..3 are four k16 steps whose input channels lie in
all four tile rows.  The order of a sum is free, so the rows only have to lie in the same order: `channel_order`.
A quarter of a tile is a whole number of words at every rate, so both columns are cut alike: they differ in the address
of their words, and at half rates in a shift by 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trellis_format.rates import Rate
from trellis_kernels.cute.gemm_share import cover_cuts
from trellis_kernels.cute.window import Cut

__all__ = [
    "BLOCK_CHANNELS",
    "PANEL_CHANNELS",
    "PANEL_ROW_BYTES",
    "PIECES",
    "PIECE_BYTES",
    "ROW_GROUP",
    "STEP_TILE_ROWS",
    "ColumnShare",
    "channel_order",
    "column_share",
    "output_channel",
    "piece_place",
]

BLOCK_CHANNELS = 128
"""Output channels that two warpgroups share."""
PANEL_CHANNELS = 64
"""Input channels of a step, which are a panel of the rows' image."""
STEP_TILE_ROWS = 4
"""Tile rows of a step."""
PANEL_ROW_BYTES = 128
"""Bytes of one row of a panel, fp16."""
PIECE_BYTES = 16
"""Bytes that are moved as one: 8 channels."""
PIECES = PANEL_ROW_BYTES // PIECE_BYTES
"""Pieces of a row of a panel."""
ROW_GROUP = 8
"""Rows that share a swizzle; a block of rows starts at a multiple of it."""

_TILES = BLOCK_CHANNELS // 16
_POSITIONS = 32
_BANK_GAP = 32  # bytes that keep the four tile rows of a step in different banks
_HALF_WORD = 16  # bits


@dataclass(frozen=True)
class ColumnShare:
    """What one lane reads of one step: a column, which is half of a quarter of a tile.

    Attributes:
        rate: K.
        quarter_words: 32-bit words of a quarter, 2K.
        words: words that hold a column's own bits; the word before them completes its first windows.
        load_words: words of one load; its bytes divide every address.
        row_bytes: bytes of a block's tiles in one tile row, which one bulk copy moves.
        row_pitch: bytes between tile rows in shared memory.
        is_shifted: whether a column ends inside a word, as the first does at half rates.
        cuts: the 32 windows in ring order, on words counted backwards from the last of the column.
    """

    rate: Rate
    quarter_words: int
    words: int
    load_words: int
    row_bytes: int
    row_pitch: int
    is_shifted: bool
    cuts: tuple[Cut, ...]

    @property
    def step_bytes(self) -> int:
        """Shared memory of a block's codes in one step."""
        return STEP_TILE_ROWS * self.row_pitch

    @property
    def read_words(self) -> int:
        """Words that a column's windows are cut from once it is aligned."""
        return self.words if self.is_shifted else self.words + 1

    @property
    def column_bytes(self) -> int:
        """Bytes from a quarter's first word to the first that is read for its second column."""
        return (self.quarter_words - self.words) * 4


@lru_cache
def column_share(rate: Rate) -> ColumnShare:
    """The share at one rate."""
    words = -(-rate.half_bits // 2)
    bits = rate.half_bits * _HALF_WORD
    lags = tuple(bits - int(end) for end in rate.ends()[:_POSITIONS])
    row_bytes = _TILES * rate.tile_bytes
    is_whole = rate.half_bits % 2 == 0
    return ColumnShare(
        rate=rate,
        quarter_words=rate.half_bits,
        words=words,
        load_words=next(count for count in (4, 2, 1) if (is_whole and words % count == 0) or count == 1),
        row_bytes=row_bytes,
        row_pitch=row_bytes + _BANK_GAP,
        is_shifted=not is_whole,
        cuts=cover_cuts(lags),
    )


def output_channel(warp: int, g: int, column: int, half: int) -> int:
    """Output channel inside a block of a warp's accumulator row `g + 8 half` of m64 operand `column`."""
    return 32 * warp + 16 * (g // 4) + 2 * (g % 4) + column + 8 * half


def channel_order() -> npt.NDArray[np.int64]:
    """`[64] int64`: the channel of a panel that lies at each place of a row, before the swizzle.

    Place 16 i + 8 z + 2 t + j holds channel 16 t + 2 i + 8 z + j, so that fragment i of every lane meets 32 contiguous
    bytes.
    """
    i, z, t, j = np.meshgrid(np.arange(4), np.arange(2), np.arange(4), np.arange(2), indexing="ij")
    return np.asarray(16 * t + 2 * i + 8 * z + j, dtype=np.int64).reshape(-1)


def piece_place(piece: int, row: int) -> int:
    """Where a piece of a row lies: the 128-byte swizzle of `wgmma`, which exchanges pieces by the row modulo 8."""
    return piece ^ (row % ROW_GROUP)
