"""Owns lut_fp16, the codebook of 104 line segments over a folded rank.  It must not know lut_e4m3.

    value = fp16(slope * local + base), negative where rank < 0x8000

The distance from the middle of the ranks, counted in odd numbers from the tail inwards, picks a segment: eight of them
in each power of two, and `local` is the place within it.
"""

from __future__ import annotations

import struct
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks.base import RateCodebook
from trellis_format.codebooks.lut_rank import rank_of, ranks_of
from trellis_format.rates import Rate

__all__ = ["SEGMENTS", "LutFp16"]

SEGMENTS = (
    (0x467D, 0x0000), (0x461D, 0x0000), (0x45EF, 0x0000), (0x45D0, 0x0000),
    (0x45B8, 0x0000), (0x45A5, 0x0000), (0x4595, 0x0000), (0x4587, 0x0000),
    (0x457B, 0x0000), (0x4570, 0x0000), (0x4566, 0x0000), (0x455D, 0x0000),
    (0x4554, 0x0000), (0x454C, 0x0000), (0x4545, 0x0000), (0x453E, 0x0000),
    (0x4532, 0x2600), (0x4527, 0x2500), (0x451C, 0x2500), (0x4513, 0x2500),
    (0x450A, 0x2500), (0x4502, 0x2400), (0x44FB, 0x2400), (0x44F4, 0x2200),
    (0x44E7, 0x2200), (0x44DB, 0x2200), (0x44D1, 0x20CD), (0x44C7, 0x20CD),
    (0x44BE, 0x209A), (0x44B5, 0x209A), (0x44AE, 0x1E66), (0x44A6, 0x2000),
    (0x4499, 0x1E92), (0x448C, 0x1E55), (0x4481, 0x1DAB), (0x4477, 0x1D25),
    (0x446E, 0x1C92), (0x4465, 0x1C00), (0x445C, 0x1C92), (0x4455, 0x1ADB),
    (0x4446, 0x1B4B), (0x4439, 0x1A85), (0x442D, 0x19DF), (0x4422, 0x19A3),
    (0x4418, 0x192A), (0x440F, 0x18D6), (0x4406, 0x185D), (0x43FB, 0x1848),
    (0x43DD, 0x178D), (0x43C1, 0x16F0), (0x43A7, 0x1650), (0x4390, 0x15CD),
    (0x437A, 0x1571), (0x4366, 0x1513), (0x4353, 0x14BF), (0x4341, 0x1472),
    (0x431F, 0x1424), (0x4301, 0x1380), (0x42E6, 0x12E0), (0x42CD, 0x125A),
    (0x42B5, 0x11EE), (0x429F, 0x1187), (0x428A, 0x112B), (0x4276, 0x10E7),
    (0x4252, 0x108B), (0x4231, 0x1022), (0x4212, 0x0F93), (0x41F6, 0x0F05),
    (0x41DC, 0x0E8F), (0x41C4, 0x0E23), (0x41AC, 0x0DC7), (0x4197, 0x0D74),
    (0x416E, 0x0D13), (0x4149, 0x0CA1), (0x4127, 0x0C44), (0x4107, 0x0BEE),
    (0x40E9, 0x0B68), (0x40CD, 0x0AF9), (0x40B3, 0x0A98), (0x409A, 0x0A40),
    (0x406B, 0x09D2), (0x4041, 0x0957), (0x4019, 0x08F4), (0x3FE8, 0x08A0),
    (0x3FA3, 0x0859), (0x3F61, 0x081C), (0x3F22, 0x07D0), (0x3EE7, 0x0774),
    (0x3E76, 0x06FD), (0x3E0F, 0x067B), (0x3DAE, 0x0611), (0x3D52, 0x05B9),
    (0x3CFB, 0x056F), (0x3CA8, 0x0531), (0x3C59, 0x04FC), (0x3C0C, 0x04CD),
    (0x3AF2, 0x0493), (0x39DD, 0x0456), (0x38D3, 0x0427), (0x37A5, 0x0403),
    (0x35B1, 0x03E9), (0x338C, 0x03D6), (0x2F86, 0x03C9), (0x004C, 0x03C3),
)  # fmt: skip
"""Base and slope of each segment, as fp16 bit patterns; from the tail of the distribution inwards."""

_HALF = 0x8000  # ranks below are negative
_FOLD_MASK = _HALF - 1
_SEGMENT_BITS = 3  # eight segments in each power of two


class LutFp16(RateCodebook):
    """The codebook of fp16 line segments, for K of 5 and 6."""

    name = "lut_fp16"
    in_exl3 = False
    legal_rates = (Rate(10), Rate(12))

    def value(self, state: int, rate: Rate) -> float:
        rank = rank_of(state, rate)
        folded = rank & _FOLD_MASK if rank >= _HALF else ~rank & _FOLD_MASK
        entry, local = _segment(0xFFFF - 2 * folded)
        base, slope = struct.unpack("<2e", struct.pack("<2H", *SEGMENTS[entry]))
        (rounded,) = struct.unpack("<e", struct.pack("<e", slope * local + base))
        return float(rounded if rank >= _HALF else -rounded)

    def evaluate(self, states: npt.NDArray[np.uint16], rate: Rate) -> npt.NDArray[np.float16]:
        ranks = ranks_of(states, rate)
        negative = ranks < _HALF
        magnitudes = self._magnitudes[np.where(negative, ~ranks, ranks) & np.uint16(_FOLD_MASK)]
        signed: npt.NDArray[np.float16] = np.where(negative, -magnitudes, magnitudes)
        return signed

    @cached_property
    def _magnitudes(self) -> npt.NDArray[np.float16]:
        """`[32768] float16` by folded rank."""
        places = np.array([_segment(0xFFFF - 2 * folded) for folded in range(_HALF)], dtype=np.int64)
        base, slope = np.array(SEGMENTS, dtype=np.uint16).view(np.float16).astype(np.float32)[places[:, 0]].T
        # slope * local has at most 11 + 13 significand bits, so float32 holds it and only the sum may round early;
        # no entry lies near enough to a tie of fp16 for that to matter, which the test of every state shows
        values: npt.NDArray[np.float32] = slope * places[:, 1].astype(np.float32) + base
        return values.astype(np.float16)


def _segment(odd: int) -> tuple[int, int]:
    """Segment and place of an odd number in [1, 65535], 65535 being the innermost rank."""
    exponent = odd.bit_length() - 1
    delta = odd - (1 << exponent)
    if exponent <= _SEGMENT_BITS:  # the outermost ranks have a segment each
        return ((1 << exponent - 1) + (delta - 1 >> 1) if exponent else 0), 0
    shift = exponent - _SEGMENT_BITS
    sub = delta >> shift
    end = (1 << exponent) + (sub << shift) + (1 << shift) - 1
    return (shift << _SEGMENT_BITS) + sub, end - odd >> 1
