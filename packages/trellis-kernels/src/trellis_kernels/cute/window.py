"""Owns how a lane cuts its state windows out of ring words: geometry, plan and emission.  It must not know codebooks.

The ring is most significant bit first, so words counted backwards from the end of a lane's bits are the digits of one
little-endian integer N: word 0 is the last, word 1 the one before it.  The state that ends `lag` bits before the end is

    s = (N >> lag) AND 0xFFFF

and bytes `lag // 8` and `lag // 8 + 1` of `N >> (lag % 8)`.  A byte permute therefore cuts a window of any byte-aligned
register, and even one that straddles two, for one instruction.  It writes the two bytes twice, `d = s | s << 16`:
modulo 2^32, (1 + 2^16)(1 - 2^16) = 1, so a codebook that needs s * M computes d * (M * (1 - 2^16)) and nothing is ever
masked.  What remains are the shifts that bring windows to byte alignment; one shifted register serves three windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from trellis_format.rates import STATE_BITS, TILE_WEIGHTS, Rate

__all__ = ["LANES", "LANE_WEIGHTS", "Cut", "LaneGeometry", "cut_windows", "lane_geometry", "plan_cuts", "shift_count"]

LANES = 32
"""Lanes of a warp; a warp decodes a tile."""
LANE_WEIGHTS = TILE_WEIGHTS // LANES
"""Consecutive ring positions that belong to one lane, which are its own matrix fragments."""

_WORD = 32
_BYTE = 8
_SERVED = (0, _BYTE, 2 * _BYTE)  # distances at which both bytes of a window are inside one shifted register

Word = TypeVar("Word")


@dataclass(frozen=True)
class LaneGeometry:
    """Which ring words a lane needs for positions 8L to 8L + 7, where lane L's bits end at `lane_bits * (L + 1)`.

    Attributes:
        lane_bits: ring bits of one lane, 8 K.
        lags: for each of the eight positions, bits from the end of its window to the end of the lane's bits.
        aligned_words: words that hold the eight windows once the end of the lane's bits is at bit 0 of word 0.
        raw_words: ring words that the lane must read for that, counted backwards from the one where its bits end.
        is_aligned: whether every lane's bits end at the end of a ring word, so that nothing needs aligning.
    """

    lane_bits: int
    lags: tuple[int, ...]
    aligned_words: int
    raw_words: int
    is_aligned: bool


@lru_cache
def lane_geometry(rate: Rate) -> LaneGeometry:
    """The geometry of one rate.  Half rates keep all lanes alike, because each lane starts at an even position."""
    lane_bits = rate.half_bits * LANE_WEIGHTS // 2
    ends = rate.ends()[:LANE_WEIGHTS]
    lags = tuple(lane_bits - int(end) for end in ends)
    span = lags[0] + STATE_BITS
    over = {-lane_bits * (lane + 1) % _WORD for lane in range(LANES)}
    return LaneGeometry(
        lane_bits=lane_bits,
        lags=lags,
        aligned_words=-(-span // _WORD),
        raw_words=-(-(max(over) + span) // _WORD),
        is_aligned=over == {0},
    )


@dataclass(frozen=True)
class Cut:
    """One window as a byte permute.

    Attributes:
        low: bit of N at which the first source register starts; a multiple of 32 is a word as it was read.
        high: the same for the second source register; equal to `low` unless the window straddles two.
        selector: the permute's selector, one nibble a byte; the result is the state, twice.
    """

    low: int
    high: int
    selector: int


def plan_cuts(lags: Sequence[int]) -> tuple[Cut, ...]:
    """Choose the shifted registers for a set of windows, using as few shifts as there can be.

    Windows whose lags agree modulo 8 can share registers.  Those at whole bytes need none.  For each other class the
    smallest lag not yet served starts a register, which also serves the windows 8 and 16 bits above.

    Args:
        lags: bits from the end of each window to bit 0 of word 0, not negative.

    Returns:
        One cut for each lag, in the order given.
    """
    starts: list[int] = []
    cuts: dict[int, Cut] = {}
    for lag in sorted(set(lags)):
        if lag % _BYTE == 0:
            start = lag // _WORD * _WORD
        else:
            start = next((start for start in starts if lag - start in _SERVED), lag)
            if start == lag:
                starts.append(start)
        cuts[lag] = _cut(start, (lag - start) // _BYTE)
    return tuple(cuts[lag] for lag in lags)


def _cut(start: int, byte: int) -> Cut:
    # bytes 4..7 of a permute are its second source, here the register one word up
    return Cut(low=start, high=start + _WORD if byte == 3 else start, selector=0x0101 * (byte | (byte + 1) << 4))


def shift_count(cuts: Sequence[Cut]) -> int:
    """Shifts that a plan costs on top of one permute for each window."""
    return len({start for cut in cuts for start in (cut.low, cut.high) if start % _WORD})


def cut_windows(
    words: Sequence[Word],
    cuts: Sequence[Cut],
    *,
    funnel_right: Callable[[Word, Word | None, int], Word],
    permute: Callable[[Word, Word, int], Word],
) -> list[Word]:
    """Carry out a plan, with whatever instructions it is given: those of a GPU, or numpy's.

    Args:
        words: 32-bit words of N, word 0 first.
        cuts: the plan.
        funnel_right: `(low, high, shift)` to the low 32 bits of `high:low >> shift`; high is None past the last word.
        permute: `(low, high, selector)` to the four bytes that the selector's nibbles choose.

    Returns:
        One 32-bit word for each cut: the 16-bit state in both halves.
    """
    registers: dict[int, Word] = {}

    def register(start: int) -> Word:
        if start not in registers:
            word, shift = divmod(start, _WORD)
            above = words[word + 1] if word + 1 < len(words) else None
            registers[start] = funnel_right(words[word], above, shift) if shift else words[word]
        return registers[start]

    return [permute(register(cut.low), register(cut.high), cut.selector) for cut in cuts]
