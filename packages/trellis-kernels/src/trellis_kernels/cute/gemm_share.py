"""Owns which ring words a lane decodes in a GEMM step, and the cheapest cuts of its windows.  It must not know `cutlass`.

A warp multiplies strips: four neighbouring tiles of a tile row, 64 output channels.  A step takes the four tile rows
that hold 64 input channels.  Lane 4g + t reads tile row t; what it reads of the strip is its share:

    wide    half a tile, 128 ring positions: half g % 2 of tile g // 2, which are its columns 4 (g % 2) + {0, 1, 2, 3}
    narrow  an eighth of each tile, 32 ring positions: column g of all four

Each 32 positions are one output channel n and its partner n + 8 over the 16 input channels of the tile row, so they are
four A fragments of `m16n8k16` whose rows are g and g + 8.  The input channels of one fragment lie in four tile rows,
one for each t: 16 t + {2i, 2i + 1, 2i + 8, 2i + 9}.  The order of a sum is free, so the B fragment only has to agree.
A wide share reads 16 bytes at once at any rate without meeting itself in the banks of the L1, except at 4 and 8 bits,
where lanes would be 64 or 128 bytes apart; those take the narrow share, whose lanes are 16 and 32 bytes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from trellis_format.rates import Rate
from trellis_kernels.cute.window import Cut

__all__ = [
    "STEP_CHANNELS",
    "STEP_TILES",
    "STRIP_CHANNELS",
    "STRIP_TILES",
    "Share",
    "cover_cuts",
    "cut_windows",
    "share_of",
    "shift_count",
]  # fmt: skip

STRIP_TILES = 4
"""Tiles of a strip, along the output channels."""
STRIP_CHANNELS = 64
"""Output channels of a strip."""
STEP_TILES = 4
"""Tile rows of a step."""
STEP_CHANNELS = 64
"""Input channels of a step."""

_COLUMN_POSITIONS = 32  # ring positions of output channels n and n + 8 over one tile row
_WORD, _BYTE, _WORD_BYTES = 32, 8, 4

Word = TypeVar("Word")


@dataclass(frozen=True)
class Share:
    """What one lane reads of one step of a strip.

    Attributes:
        rate: K.
        is_wide: half of one tile rather than an eighth of four.
        pieces: contiguous pieces of the ring that the lane reads: 1, or one for each tile.
        words: 32-bit words of a piece.
        load_words: words of one load; its bytes divide every address.
        columns: output channels (with their partners) of a piece.
        lane_bytes: bytes between the pieces of neighbouring g.
        cuts: the windows of a piece, in ring order.
    """

    rate: Rate
    is_wide: bool
    pieces: int
    words: int
    load_words: int
    columns: int
    lane_bytes: int
    cuts: tuple[Cut, ...]

    @property
    def step_words(self) -> int:
        """32-bit words that a lane reads in a step."""
        return self.pieces * self.words

    def column(self, piece: int, index: int, g: int) -> int:
        """Output channel inside the strip of a lane's column, of the half below 8."""
        if self.is_wide:
            return 16 * (g // 2) + 4 * (g % 2) + index
        return 16 * piece + g


@lru_cache
def share_of(rate: Rate) -> Share:
    """The share at one rate."""
    is_wide = rate.bits not in (4, 8)
    pieces, columns = (1, 4) if is_wide else (STRIP_TILES, 1)
    positions = columns * _COLUMN_POSITIONS
    words = positions * rate.half_bits // 2 // _WORD
    ends = rate.ends()[:positions]  # half rates repeat every two positions, so every piece is like the first
    lags = tuple(words * _WORD - int(end) for end in ends)
    load_words = next(count for count in (4, 2, 1) if words % count == 0)
    return Share(rate, is_wide, pieces, words, load_words, columns, words * _WORD_BYTES, cover_cuts(lags))


def cover_cuts(lags: Sequence[int]) -> tuple[Cut, ...]:
    """Choose the fewest shifted words that hold both bytes of every window.

    Windows whose lags agree modulo 8 share shifted words.  A byte permute takes its bytes from any two of them, so the
    question is to cover the bytes that are needed with runs of four; taking the lowest uncovered byte as the start of
    the next run is optimal.  Windows at whole bytes take the ring words as they were read.

    Args:
        lags: bits from the end of each window to bit 0 of word 0, not negative.

    Returns:
        One cut for each lag, in the order given.
    """
    places: dict[int, tuple[int, int]] = {}
    for phase in range(_BYTE):
        needed = sorted({byte for lag in lags if lag % _BYTE == phase for byte in (lag // _BYTE, lag // _BYTE + 1)})
        start: int | None = None
        for byte in needed:
            if phase == 0:
                start = byte // _WORD_BYTES * _WORD_BYTES
            elif start is None or byte - start >= _WORD_BYTES:
                start = byte
            places[byte * _BYTE + phase] = (start * _BYTE + phase, byte - start)
    return tuple(_cut(places[lag], places[lag + _BYTE]) for lag in lags)


def _cut(low: tuple[int, int], high: tuple[int, int]) -> Cut:
    second = high[1] if high[0] == low[0] else high[1] + _WORD_BYTES  # bytes 4..7 are the permute's second source
    return Cut(low=low[0], high=high[0], selector=0x0101 * (low[1] | second << 4))


def cut_in_turn(
    words: Sequence[Word],
    cuts: Sequence[Cut],
    *,
    funnel_right: Callable[[Word, Word | None, int], Word],
    permute: Callable[[Word, Word, int], Word],
) -> Iterator[Word]:
    """Carry out a plan window by window, each shifted word made where it is first needed.

    As `cut_windows`, whose 128 results at once would be 128 live registers for a compiler to undo.
    """
    registers: dict[int, Word] = {}

    def register(start: int) -> Word:
        if start not in registers:
            word, shift = divmod(start, _WORD)
            above = words[word + 1] if word + 1 < len(words) else None
            registers[start] = funnel_right(words[word], above, shift) if shift else words[word]
        return registers[start]

    for cut in cuts:
        yield permute(register(cut.low), register(cut.high), cut.selector)
