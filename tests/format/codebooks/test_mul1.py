"""Holds mul1 to worked examples, and to one rounding of the exact rational value."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from trellis_format.codebooks.mul1 import BIAS_BITS, BYTE_BASE, SCALE_BITS, Mul1

# state, product x, its bytes, fp16 pattern of 1024 + S, bits of the value, value
EXAMPLES = """
    0000 00000000   0   0   0   0 6400 C2E8 -3.453125
    0001 83DCD12D 131 220 209  45 665D 3921  0.64111328125
    0002 07B9A25A   7 185 162  90 65BC B72D -0.448486328125
    00FF 58F45BD3  88 244  91 211 667A 3AB3  0.83740234375
    1234 4F8FA724  79 143 167  36 65A9 B89E -0.5771484375
    7FFF E4B9AED3 228 185 174 211 671E 3FCA  1.947265625
    8000 68968000 104 150 128   0 657E BAF2 -0.8681640625
    ABCD 178C9009  23 140 144   9 653C BD42 -1.314453125
    BEEF FE66AF03 254 102 175   3 6616 3124  0.16064453125
    FFFF 4D502ED3  77  80  46 211 659E B936 -0.6513671875
"""


def half(bits: int) -> np.float16:
    return np.array(bits, np.uint16).view(np.float16)[()]


@pytest.mark.parametrize("line", EXAMPLES.strip().splitlines())
def test_worked_examples(line: str) -> None:
    state, product, *octets, pattern, bits, value = line.split()
    x = int(state, 16) * Mul1.multiplier % 2**32
    assert f"{x:08X}" == product
    assert [x >> 24, x >> 16 & 255, x >> 8 & 255, x & 255] == list(map(int, octets))
    assert BYTE_BASE + sum(map(int, octets)) == int(pattern, 16)
    assert Mul1().value(int(state, 16)) == float(value)
    decoded = Mul1().evaluate(np.array([int(state, 16)], np.uint16))
    assert f"{decoded.view(np.uint16)[0]:04X}" == bits


def test_constants_are_what_their_bits_say() -> None:
    assert float(half(BYTE_BASE)) == 1024.0
    assert float(half(SCALE_BITS)) == 0.00676727294921875
    assert float(half(BIAS_BITS)) == -10.3828125
    assert [float(half(BYTE_BASE + total)) for total in (0, 1, 1020)] == [1024.0, 1025.0, 2044.0]


def test_every_byte_sum_is_rounded_once() -> None:
    states = np.arange(65536, dtype=np.uint16)
    products = (states.astype(np.uint64) * Mul1.multiplier % 2**32).astype(np.uint32)
    sums = products.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    values = Mul1().evaluate(states)
    for total in np.unique(sums):
        exact = Fraction(1024 + int(total)) * Fraction(float(half(SCALE_BITS))) + Fraction(float(half(BIAS_BITS)))
        found = set(values[sums == total].tolist())
        assert len(found) == 1
        (value,) = found
        error = abs(Fraction(value) - exact)
        neighbours = (np.nextafter(np.float16(value), np.float16(side)) for side in (-np.inf, np.inf))
        assert all(error <= abs(Fraction(float(neighbour)) - exact) for neighbour in neighbours)


def test_two_roundings_would_differ() -> None:
    # fp16 multiply, then fp16 add: the table must not be this one
    states = np.arange(65536, dtype=np.uint16)
    products = (states.astype(np.uint64) * Mul1.multiplier % 2**32).astype(np.uint32)
    sums = products.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    twice = (np.float16(1024) + sums.astype(np.float16)) * half(SCALE_BITS) + half(BIAS_BITS)
    assert not np.array_equal(twice, Mul1().table)
