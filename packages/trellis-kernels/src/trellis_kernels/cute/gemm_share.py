"""Owns which ring words a lane decodes in a GEMM step, and how it cuts its windows.  It must not know `cutlass`.

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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from trellis_format.rates import STATE_BITS, Rate
from trellis_kernels.cute.window import Cut

__all__ = [
    "STEP_CHANNELS",
    "STEP_TILES",
    "STRIP_CHANNELS",
    "STRIP_TILES",
    "Share",
    "Source",
    "Window",
    "cover_cuts",
    "cover_windows",
    "cut_in_turn",
    "hash_in_turn",
    "share_of",
    "shift_counts",
]

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
_LOW_HALF_TWICE = 0x1010  # a permute's selector
_HALVES_TWICE = {_LOW_HALF_TWICE: 0, 0x3232: 1}  # selectors that take a whole half of one register
_HALVES_APART = 2  # of this many such windows the first is taken by `hash_half`, so that both pipes have as much to do

Word = TypeVar("Word")


@dataclass(frozen=True)
class Source:
    """A register that a window takes bytes from.

    Words counted backwards from the end of the piece are the digits of a little-endian integer N.

    Attributes:
        start: bit of N at which the register starts; a multiple of 32 is a word as it was read.
        is_multiplied: made by a multiplication, so that its lowest byte is not of N.
    """

    start: int
    is_multiplied: bool = False


@dataclass(frozen=True)
class Window:
    """One state as a byte permute of two registers, which may be one; the result is the state, twice."""

    low: Source
    high: Source
    selector: int


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
        windows: the windows of a piece, in ring order.
        partners: for each window the index of the one whose state lies right above it in one register, if it is the
            low half of a register as it was read or shifted; see `hash_in_turn`.
    """

    rate: Rate
    is_wide: bool
    pieces: int
    words: int
    load_words: int
    columns: int
    lane_bytes: int
    windows: tuple[Window, ...]
    partners: tuple[int | None, ...]

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
def share_of(rate: Rate, multiply_cost: float = 1.0) -> Share:
    """The share at one rate; `multiply_cost` as in `cover_windows`."""
    is_wide = rate.bits not in (4, 8)
    pieces, columns = (1, 4) if is_wide else (STRIP_TILES, 1)
    positions = columns * _COLUMN_POSITIONS
    words = positions * rate.half_bits // 2 // _WORD
    ends = rate.ends()[:positions]  # half rates repeat every two positions, so every piece is like the first
    lags = tuple(words * _WORD - int(end) for end in ends)
    load_words = next(count for count in (4, 2, 1) if words % count == 0)
    windows = cover_windows(lags, multiply_cost)
    partners = _partners(lags, windows)
    return Share(rate, is_wide, pieces, words, load_words, columns, words * _WORD_BYTES, windows, partners)


def _partners(lags: Sequence[int], windows: Sequence[Window]) -> tuple[int | None, ...]:
    places = {lag: index for index, lag in enumerate(lags)}
    return tuple(
        places.get(lag + STATE_BITS) if window == Window(Source(lag), Source(lag), _LOW_HALF_TWICE) else None
        for lag, window in zip(lags, windows, strict=True)
    )


def cover_windows(lags: Sequence[int], multiply_cost: float = 1.0) -> tuple[Window, ...]:
    """Choose the cheapest shifted words that hold both bytes of every window.

    Windows whose lags agree modulo 8 share shifted words.  A byte permute takes its bytes from any two of them, so the
    question is to cover the bytes that are needed.  A funnel shift makes any run of four.  A multiplication by a power
    of two makes the three that lie inside one ring word, as bytes 1 to 3 of a word that starts one byte before it, and
    spares the pipe that permutes and shifts.  Windows at whole bytes take the ring words as they were read.

    Args:
        lags: bits from the end of each window to bit 0 of word 0, not negative.
        multiply_cost: of a multiplication, where a funnel shift costs 1.

    Returns:
        One window for each lag, in the order given.
    """
    places: dict[int, tuple[Source, int]] = {}
    for phase in range(_BYTE):
        needed = sorted({byte for lag in lags if lag % _BYTE == phase for byte in (lag // _BYTE, lag // _BYTE + 1)})
        if phase == 0:
            runs = [(byte // _WORD_BYTES * _WORD_BYTES, False) for byte in needed]
        else:
            runs = _cover(needed, multiply_cost)
        for byte, (first, is_multiplied) in zip(needed, runs, strict=True):
            places[byte * _BYTE + phase] = (Source(first * _BYTE + phase, is_multiplied), byte - first)
    return tuple(_window(places[lag], places[lag + _BYTE]) for lag in lags)


def cover_cuts(lags: Sequence[int]) -> tuple[Cut, ...]:
    """As `cover_windows` without multiplications, as the cuts of `window.cut_windows`."""
    windows = cover_windows(lags, math.inf)
    return tuple(Cut(window.low.start, window.high.start, window.selector) for window in windows)


def _cover(needed: list[int], multiply_cost: float) -> list[tuple[int, bool]]:
    """For each needed byte of one phase, ascending: first byte of the register it is taken from, and its kind."""
    best: list[tuple[float, list[tuple[int, bool]]]] = [(0.0, [])]  # over the bytes from each on, from the last
    for index in range(len(needed) - 1, -1, -1):
        byte = needed[index]
        word = byte // _WORD_BYTES * _WORD_BYTES
        options = [(1.0, (byte, False), byte + _WORD_BYTES)]
        if byte < word + 3:
            options.append((multiply_cost, (word - 1, True), word + 3))
        choices = []
        for cost, run, end in options:
            count = sum(value < end for value in needed[index:])
            rest = best[len(best) - count]
            choices.append((cost + rest[0], [run] * count + rest[1]))
        best.append(min(choices, key=lambda choice: choice[0]))
    return best[-1][1]


def _window(low: tuple[Source, int], high: tuple[Source, int]) -> Window:
    second = high[1] if high[0] == low[0] else high[1] + _WORD_BYTES  # bytes 4..7 are the permute's second source
    return Window(low[0], high[0], selector=0x0101 * (low[1] | second << 4))


def shift_counts(windows: Sequence[Window]) -> tuple[int, int]:
    """Funnel shifts and multiplications that a plan costs on top of one permute for each window."""
    sources = {source for window in windows for source in (window.low, window.high) if source.start % _WORD}
    multiplied = sum(source.is_multiplied for source in sources)
    return len(sources) - multiplied, multiplied


def cut_in_turn(
    words: Sequence[Word],
    windows: Sequence[Window],
    *,
    funnel_right: Callable[[Word, Word | None, int], Word],
    multiply: Callable[[Word, int], Word],
    permute: Callable[[Word, Word, int], Word],
) -> Iterator[Word]:
    """Carry out a plan window by window, each register made where it is first needed.

    All 128 results at once would be 128 live registers for a compiler to undo.

    Args:
        words: 32-bit words of N, word 0 first.
        windows: the plan.
        funnel_right: `(low, high, shift)` to the low 32 bits of `high:low >> shift`; high is None past the last word.
        multiply: `(word, factor)` to the product modulo 2^32.
        permute: `(low, high, selector)` to the four bytes that the selector's nibbles choose.
    """
    register = _registers(words, funnel_right, multiply)
    for window in windows:
        yield permute(register(window.low), register(window.high), window.selector)


def hash_in_turn(
    words: Sequence[Word],
    share: Share,
    *,
    funnel_right: Callable[[Word, Word | None, int], Word],
    multiply: Callable[[Word, int], Word],
    permute: Callable[[Word, Word, int], Word],
    hash_twice: Callable[[Word], Word],
    hash_below: Callable[[Word, Word], Word],
    hash_half: Callable[[Word, int], Word],
) -> Iterator[Word]:
    """The hash of every window of a piece in turn, with a multiplication in place of a permute where that can be.

    A window in the low half of a register is not cut.  What lies above it, times the multiplier, spoils the upper half
    of its product by the low half of another hash: that of the state 16 bits further up, which came before.  Of the
    other windows that are a half of a register, every second one is cut by a product too.

    Args:
        words: as in `cut_in_turn`.
        share: whose windows.
        funnel_right: as in `cut_in_turn`.
        multiply: as in `cut_in_turn`.
        permute: as in `cut_in_turn`.
        hash_twice: from a state in both halves of its register.
        hash_below: from a register whose low half is the state, and the hash of the state in its upper half.
        hash_half: from a register and which half of it is the state, 0 or 1.
    """
    register = _registers(words, funnel_right, multiply)
    hashes: list[Word] = []
    halves = 0
    for window, partner in zip(share.windows, share.partners, strict=True):
        low = register(window.low)
        if partner is not None and partner < len(hashes):
            hashes.append(hash_below(low, hashes[partner]))
            yield hashes[-1]
            continue
        is_half = window.low == window.high and window.selector in _HALVES_TWICE
        if is_half and halves % _HALVES_APART == 0:
            hashes.append(hash_half(low, _HALVES_TWICE[window.selector]))
        else:
            hashes.append(hash_twice(permute(low, register(window.high), window.selector)))
        halves += is_half
        yield hashes[-1]


def _registers(
    words: Sequence[Word],
    funnel_right: Callable[[Word, Word | None, int], Word],
    multiply: Callable[[Word, int], Word],
) -> Callable[[Source], Word]:
    """Each register of a plan, made where it is first needed."""
    registers: dict[Source, Word] = {}

    def register(source: Source) -> Word:
        if source not in registers:
            word, shift = divmod(source.start, _WORD)
            above = words[word + 1] if word + 1 < len(words) else None
            if source.is_multiplied:
                registers[source] = multiply(words[word + 1], 1 << (_WORD - shift))
            else:
                registers[source] = funnel_right(words[word], above, shift) if shift else words[word]
        return registers[source]

    return register
