"""Owns mul1, the codebook that sums the four bytes of one product.  It must not know the other codebooks.

    x = s * 0x83DCD12D  (mod 2^32);  S = sum of the four bytes of x, 0..1020
    value = fma(1024 + S, fp16 0x1EEE, fp16 0xC931), one rounding to fp16

fp16 holds 1024 + S exactly as the bit pattern 0x6400 + S, so a kernel builds it with one dot product of bytes.
"""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks.base import StateCodebook
from trellis_format.rates import ALL_RATES

__all__ = ["BIAS_BITS", "BYTE_BASE", "SCALE_BITS", "Mul1"]

BYTE_BASE = 0x6400
"""Bit pattern of fp16 1024."""
SCALE_BITS = 0x1EEE
"""Bit pattern of the fp16 scale, 0.00676727294921875."""
BIAS_BITS = 0xC931
"""Bit pattern of the fp16 bias, -10.3828125."""

_SCALE = struct.unpack("<e", struct.pack("<H", SCALE_BITS))[0]
_BIAS = struct.unpack("<e", struct.pack("<H", BIAS_BITS))[0]


class Mul1(StateCodebook):
    """EXL3's byte-sum codebook, the only one with half rates."""

    name = "mul1"
    in_exl3 = True
    marker = "mul1"
    multiplier = 0x83DCD12D
    legal_rates = ALL_RATES

    def value(self, state: int) -> float:
        product = state * self.multiplier & 0xFFFFFFFF
        total = sum(product.to_bytes(4, "little"))
        exact = Fraction(1024 + total) * Fraction(_SCALE) + Fraction(_BIAS)
        (rounded,) = struct.unpack("<e", struct.pack("<e", float(exact)))
        return float(rounded)

    def evaluate(self, states: npt.NDArray[np.uint16]) -> npt.NDArray[np.float16]:
        product = states.astype(np.uint32) * np.uint32(self.multiplier)
        total = np.zeros(states.shape, dtype=np.uint32)
        for shift in (0, 8, 16, 24):
            total += (product >> np.uint32(shift)) & np.uint32(0xFF)
        # (1024 + S) * scale + bias needs 22 significand bits at most, so float64 is exact and the cast rounds once
        exact: npt.NDArray[np.float64] = (1024.0 + total.astype(np.float64)) * _SCALE + _BIAS
        return exact.astype(np.float16)
