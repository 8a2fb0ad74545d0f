"""Owns lut_e4m3, the codebook whose values are bytes of a 4 KiB table of 8-bit floats.  It must not know lut_fp16.

    value = E4M3 byte T12[rank >> 4]

The exact byte of a rank is a sign (negative below 0x8000) and the number of transition points that its folded rank
reaches.  T12 keeps, for each 16 consecutive ranks, the byte that most of them have.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks.base import STATES, RateCodebook
from trellis_format.codebooks.lut_rank import rank_of, ranks_of
from trellis_format.rates import Rate

__all__ = ["LutE4M3"]

_TRANSITIONS = (
    17, 51, 85, 119, 153, 187, 221, 255, 289, 323, 357, 391, 426, 460, 494, 528, 579, 647, 715, 783, 851, 919, 987,
    1055, 1157, 1293, 1429, 1565, 1701, 1837, 1973, 2108, 2312, 2583, 2854, 3124, 3395, 3665, 3934, 4203, 4606, 5141,
    5674, 6205, 6732, 7258, 7779, 8298, 9070, 10085, 11084, 12065, 13026, 13967, 14885, 15781, 17081, 18725, 20265,
    21696, 23017, 24229, 25332, 26330, 27637, 29054, 30143, 30957, 31548, 31967, 32255, 32447, 32617, 32717, 32753,
    32764, 32767,
)  # fmt: skip
_HALF = 0x8000  # ranks below are negative
_SIGN = 0x80
_GRAIN = 4  # rank bits that an entry of T12 spans
_MANTISSA_BITS = 3
_EXPONENT_BIAS = 7


class LutE4M3(RateCodebook):
    """The codebook of 8-bit floats, for K of 2, 3 and 4."""

    name = "lut_e4m3"
    in_exl3 = False
    legal_rates = (Rate(4), Rate(6), Rate(8))

    def value(self, state: int, rate: Rate) -> float:
        return _e4m3(int(self.compact_bytes[rank_of(state, rate) >> _GRAIN]))

    def evaluate(self, states: npt.NDArray[np.uint16], rate: Rate) -> npt.NDArray[np.float16]:
        floats = np.array([_e4m3(byte) for byte in range(256)], dtype=np.float16)
        return floats[self.evaluate_bytes(states, rate)]

    def evaluate_bytes(self, states: npt.NDArray[np.uint16], rate: Rate) -> npt.NDArray[np.uint8]:
        """The E4M3 bytes of many states at K: `[...] uint16` to `[...] uint8`."""
        found: npt.NDArray[np.uint8] = self.compact_bytes[ranks_of(states, rate) >> np.uint16(_GRAIN)]
        return found

    @cached_property
    def compact_bytes(self) -> npt.NDArray[np.uint8]:
        """T12, `[4096] uint8`: the E4M3 byte of each 16 consecutive ranks, read-only."""
        run = 1 << _GRAIN
        exact = [[_exact_byte(first + place) for place in range(run)] for first in range(0, STATES, run)]
        table = np.array([min(set(row), key=lambda byte: (-row.count(byte), byte)) for row in exact], dtype=np.uint8)
        table.setflags(write=False)
        return table


def _exact_byte(rank: int) -> int:
    folded = rank & _HALF - 1
    if rank >= _HALF:
        return bisect_right(_TRANSITIONS, folded)
    magnitude = bisect_right(_TRANSITIONS, folded ^ _HALF - 1)
    return magnitude | _SIGN if magnitude else 0


def _e4m3(byte: int) -> float:
    """An 8-bit float of 4 exponent and 3 mantissa bits; the values here stay far below its NaN codes."""
    exponent, mantissa = byte >> _MANTISSA_BITS & 0xF, byte & (1 << _MANTISSA_BITS) - 1
    scale = 2.0 ** (max(exponent, 1) - _EXPONENT_BIAS - _MANTISSA_BITS)
    magnitude = (mantissa + (1 << _MANTISSA_BITS if exponent else 0)) * scale
    return -magnitude if byte & _SIGN else magnitude
