"""Owns the two codebooks that add the halves of a hashed word: 3inst and mcg.  It must not know mul1 or any table.

    x = s * M + A  (mod 2^32);  y = (x AND 0x8FFF8FFF) XOR 0x3B603B60
    value = fp16(low half of y) + fp16(high half of y), one rounding to nearest even

Each half keeps its sign and mantissa bits and gets an exponent field of 0b01100 to 0b01111, so that its magnitude is
in [0.125, 2): no zeros, subnormals or infinities.
"""

from __future__ import annotations

import struct
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks.base import StateCodebook
from trellis_format.rates import ALL_RATES

__all__ = ["FIELD_MASK", "FIELD_XOR", "MCG", "ThreeInst"]

FIELD_MASK = 0x8FFF8FFF
"""Bits of the hash that survive: sign, the low two exponent bits, mantissa, in each half."""
FIELD_XOR = 0x3B603B60
"""Flips that put each half's exponent into range."""

_INTEGER_RATES = tuple(rate for rate in ALL_RATES if not rate.is_half)


class _SummedHalves(StateCodebook):
    hash_multiplier: ClassVar[int]
    hash_addend: ClassVar[int]
    legal_rates = _INTEGER_RATES
    in_exl3 = True

    def value(self, state: int) -> float:
        field = (state * self.hash_multiplier + self.hash_addend) & FIELD_MASK ^ FIELD_XOR
        low, high = struct.unpack("<2e", struct.pack("<I", field))
        (rounded,) = struct.unpack("<e", struct.pack("<e", low + high))
        return float(rounded)

    def evaluate(self, states: npt.NDArray[np.uint16]) -> npt.NDArray[np.float16]:
        hashed = states.astype(np.uint32) * np.uint32(self.hash_multiplier) + np.uint32(self.hash_addend)
        field = (hashed & np.uint32(FIELD_MASK)) ^ np.uint32(FIELD_XOR)
        low = (field & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
        high = (field >> np.uint32(16)).astype(np.uint16).view(np.float16)
        # float32 holds the sum of two fp16 in [0.125, 2) exactly, so this rounds once
        return (low.astype(np.float32) + high.astype(np.float32)).astype(np.float16)


class ThreeInst(_SummedHalves):
    """EXL3's codebook of files without a marker."""

    name = "3inst"
    hash_multiplier = 89226354
    hash_addend = 64248484


class MCG(_SummedHalves):
    """EXL3's multiplicative-congruential codebook, without an addend."""

    name = "mcg"
    marker = "mcg"
    multiplier = 0xCBAC1FED
    hash_multiplier = 0xCBAC1FED
    hash_addend = 0
