"""Owns which ring words a lane decodes in a step of the many-row GEMM, and where they lie.  It must not know `cutlass`.

A warpgroup multiplies a block of 128 output channels, which are 8 neighbouring tiles of a tile row; a step takes the 4
tile rows that hold 64 input channels.  Warp w owns tiles 2w and 2w + 1.  Lane 4g + t reads 64 ring positions of tile
row t, a quarter of a tile: quarter g % 4 of tile 2w + g // 4.  Those are two output channels, each with its partner 8
above, over the 16 input channels of the tile row:

    output  32 w + 16 (g // 4) + 2 (g % 4) + c + 8 h                            column c and half h in {0, 1}
    input   16 t + 2 i + j + 8 z                                                fragment i, j and z

So column c of all lanes is an m64 operand, and its fragments i = 0..3 are four k16 steps whose input channels lie in
all four tile rows.  The order of a sum is free, so the rows only have to lie in the same order: `channel_order`.
A quarter of a tile is a whole number of words at every rate, half rates too, so nothing is ever aligned.
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
    "QuarterShare",
    "channel_order",
    "output_channel",
    "piece_place",
    "quarter_share",
]

BLOCK_CHANNELS = 128
"""Output channels of a warpgroup."""
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
_POSITIONS = 64
_COLUMNS = 2
_BANK_GAP = 32  # bytes that keep the four tile rows of a step in different banks


@dataclass(frozen=True)
class QuarterShare:
    """What one lane reads of one step.

    Attributes:
        rate: K.
        words: 32-bit words of a share, 2K.
        load_words: words of one load; its bytes divide every address.
        row_bytes: bytes of a block's tiles in one tile row, which one bulk copy moves.
        row_pitch: bytes between tile rows in shared memory.
        cuts: the 64 windows in ring order, on words counted backwards from the last of the share.
    """

    rate: Rate
    words: int
    load_words: int
    row_bytes: int
    row_pitch: int
    cuts: tuple[Cut, ...]

    @property
    def step_bytes(self) -> int:
        """Shared memory of a block's codes in one step."""
        return STEP_TILE_ROWS * self.row_pitch

    def column_words(self, column: int) -> frozenset[int]:
        """Words that hold a column's windows, counted backwards from the last; `words` is the one before the share."""
        starts = [start for cut in self.cuts[32 * column : 32 * column + 32] for start in (cut.low, cut.high)]
        reached = {start // 32 for start in starts} | {start // 32 + 1 for start in starts if start % 32}
        return frozenset(word for word in reached if word <= self.words)

    @property
    def columns(self) -> int:
        """Output channels of a share, without their partners."""
        return _COLUMNS


@lru_cache
def quarter_share(rate: Rate) -> QuarterShare:
    """The share at one rate."""
    words = rate.half_bits
    lags = tuple(words * 32 - int(end) for end in rate.ends()[:_POSITIONS])
    row_bytes = _TILES * rate.tile_bytes
    return QuarterShare(
        rate=rate,
        words=words,
        load_words=next(count for count in (4, 2, 1) if words % count == 0),
        row_bytes=row_bytes,
        row_pitch=row_bytes + _BANK_GAP,
        # each column cuts for itself, because it loads its own words; shifted words are shared inside it
        cuts=tuple(cut for first in range(0, _POSITIONS, _POSITIONS // _COLUMNS) for cut in _column_cuts(lags, first)),
    )


def _column_cuts(lags: tuple[int, ...], first: int) -> tuple[Cut, ...]:
    return cover_cuts(lags[first : first + _POSITIONS // _COLUMNS])


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
