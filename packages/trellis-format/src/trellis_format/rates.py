"""Owns the rate of a tile: how many bits each of its 256 weights takes, and how the bit ring advances.

It must not know codebooks or files.  A rate K is carried as the integer 2K, so that half rates compare exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError

__all__ = ["ALL_RATES", "STATE_BITS", "TILE", "TILE_WEIGHTS", "Rate"]

TILE = 16
"""Rows and columns of a tile, in channels."""
TILE_WEIGHTS = TILE * TILE
"""Weights of a tile, which are also the positions of its ring."""
STATE_BITS = 16
"""Width of the trellis state window, in bits."""

_HALF_BITS = (*range(2, 17, 2), 3, 5, 7)
_HALF_NIBBLE_BASE = 8  # nibbles 9, 10, 11 are 1.5, 2.5, 3.5: eight plus the whole bits


@dataclass(frozen=True, order=True)
class Rate:
    """Bits per weight of one tile, K in {1, 2, ..., 8, 1.5, 2.5, 3.5}.

    Args:
        half_bits: the integer 2K.

    Raises:
        FormatTypeError: if `half_bits` is not an int.
        FormatValueError: if 2K is not one of 2, 4, ..., 16, 3, 5, 7.
    """

    half_bits: int

    def __post_init__(self) -> None:
        if isinstance(self.half_bits, bool) or not isinstance(self.half_bits, int):
            raise FormatTypeError(f"half_bits must be an int, got {type(self.half_bits).__name__}")
        if self.half_bits not in _HALF_BITS:
            few = self.half_bits.bit_length() < 64  # of more, neither a quotient nor a decimal text can be sure
            bits = f"= {self.half_bits / 2:g}" if few else f"of {self.half_bits.bit_length()} binary digits"
            raise FormatValueError(f"bitrate K {bits} is not legal; legal K: {_legal_text()}")

    @classmethod
    def of(cls, bits: int | float | str | Fraction) -> Rate:
        """The rate of K bits per weight, for example `Rate.of(2.5)` or `Rate.of("3")`.

        Raises:
            FormatValueError: if K is not a legal rate.
        """
        try:
            doubled = Fraction(bits) * 2
        except (ValueError, TypeError, ArithmeticError) as error:
            raise FormatValueError(f"bitrate {bits!r} is not a number; legal K: {_legal_text()}") from error
        if doubled.denominator != 1:
            raise FormatValueError(f"bitrate K = {bits} is not a multiple of 1/2; legal K: {_legal_text()}")
        return cls(int(doubled))

    @classmethod
    def from_width(cls, width: int) -> Rate:
        """The rate of a tile that is stored in `width` 16-bit words (width = 16 K).

        Raises:
            FormatValueError: if no legal K has that width.
        """
        half_bits, remainder = divmod(width, TILE // 2)
        if remainder == 0 and half_bits in _HALF_BITS:
            return cls(half_bits)
        legal = ", ".join(str(half * TILE // 2) for half in sorted(_HALF_BITS))
        raise FormatValueError(f"trellis width {width} is not 16*K for a legal bitrate K; legal widths: {legal}")

    @classmethod
    def from_nibble(cls, nibble: int) -> Rate:
        """The rate of one nibble of a rate byte: 1..8 are K, 9..11 are 1.5, 2.5, 3.5.

        Raises:
            FormatValueError: if the nibble is 0 or above 11.
        """
        if 1 <= nibble <= 8:
            return cls(2 * nibble)
        if nibble in (9, 10, 11):
            return cls(2 * (nibble - _HALF_NIBBLE_BASE) + 1)
        raise FormatValueError(f"rate nibble {nibble} is illegal; legal: 1..8 for K, 9, 10, 11 for 1.5, 2.5, 3.5")

    @property
    def nibble(self) -> int:
        """The nibble of a rate byte that stands for this rate."""
        return self.half_bits // 2 + (_HALF_NIBBLE_BASE if self.is_half else 0)

    @property
    def is_half(self) -> bool:
        """Whether K has a fractional half bit."""
        return self.half_bits % 2 == 1

    @property
    def bits(self) -> float:
        """K, in bits per weight."""
        return self.half_bits / 2

    @property
    def tile_words16(self) -> int:
        """16-bit words of a tile, 16 K."""
        return self.half_bits * TILE // 2

    @property
    def tile_words32(self) -> int:
        """32-bit words of a tile, 8 K."""
        return self.half_bits * TILE // 4

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, 32 K."""
        return self.half_bits * TILE

    @property
    def ring_bits(self) -> int:
        """Bits of the closed ring of a tile, 256 K."""
        return self.half_bits * TILE_WEIGHTS // 2

    def advances(self) -> npt.NDArray[np.int64]:
        """`[256] int64`: bits by which the ring advances when it enters each position.

        Integer rates advance K bits everywhere; K = a + 1/2 advances a bits at even and a + 1 at odd positions.
        """
        steps = np.full(TILE_WEIGHTS, self.half_bits // 2, dtype=np.int64)
        if self.is_half:
            steps[1::2] += 1
        return steps

    def ends(self) -> npt.NDArray[np.int64]:
        """`[256] int64`: ring bit just past the state window of each position; the last one is `ring_bits`."""
        return np.cumsum(self.advances())

    def __str__(self) -> str:
        return f"{self.bits:g}"


def _legal_text() -> str:
    return ", ".join(f"{half / 2:g}" for half in sorted(_HALF_BITS))


ALL_RATES: tuple[Rate, ...] = tuple(Rate(half) for half in sorted(_HALF_BITS))
"""Every legal rate, ascending."""
