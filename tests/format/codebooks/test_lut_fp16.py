"""Holds lut_fp16 to its conformance hashes, and the array law to exact arithmetic on every state."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from trellis_format.codebooks import STATES, get_codebook
from trellis_format.codebooks.lut_fp16 import SEGMENTS, LutFp16, _segment
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import ALL_RATES, Rate

TABLES = {
    5: "828f212de9a30e3ea5b321e2ab8637e7c633df2ce416fcabb747f094b654ee0a",
    6: "2ec7ed71fd5658c9acbf1fa4587b6351898e8c0faa5dd5cc9a2b0a16371b1b54",
}
ALL = np.arange(STATES, dtype=np.uint16)


@pytest.fixture(name="law")
def _law() -> LutFp16:
    return LutFp16()


def test_segments_have_their_hash() -> None:
    stored = np.array(SEGMENTS, dtype="<u2").tobytes()
    assert len(stored) == 416
    assert hashlib.sha256(stored).hexdigest() == "17cf4ca9ef1e3a07c3354c12f7ac887b4e081b1668bea61eb37d8f2b410bb968"


@pytest.mark.parametrize("bits", TABLES)
def test_tables_have_their_hashes(law: LutFp16, bits: int) -> None:
    table = law.table_for(Rate.of(bits))
    assert hashlib.sha256(table.astype("<f2").tobytes()).hexdigest() == TABLES[bits]


@pytest.mark.parametrize("bits", TABLES)
def test_scalar_law_array_law_and_table_agree_on_every_state(law: LutFp16, bits: int) -> None:
    rate = Rate.of(bits)
    scalar = np.array([law.value(state, rate) for state in range(STATES)])
    assert np.array_equal(law.evaluate(ALL, rate).astype(np.float64), scalar)
    assert np.array_equal(law.table_for(rate).view(np.uint16), law.evaluate(ALL, rate).view(np.uint16))


def test_known_odd_numbers_have_their_segments() -> None:
    assert [_segment(odd)[0] for odd in (1, 3, 5, 7, 9, 15, 17, 65535)] == [0, 1, 2, 3, 4, 7, 8, 103]
    assert {_segment(odd)[0] for odd in range(1, 65536, 2)} == set(range(104))


def test_magnitudes_round_the_exact_product_once() -> None:
    pairs = {(_segment(odd), odd) for odd in range(1, 65536, 2)}
    law = LutFp16()
    for (entry, local), odd in sorted(pairs)[::13]:
        base, slope = (Fraction(float(half)) for half in np.array(SEGMENTS[entry], np.uint16).view(np.float16))
        exact = float(slope * local + base)
        assert law._magnitudes[(0xFFFF - odd) // 2] == np.float16(exact)


@pytest.mark.parametrize("bits", TABLES)
def test_range_symmetry_and_spread(law: LutFp16, bits: int) -> None:
    values = law.table_for(Rate.of(bits)).astype(np.float64)
    assert values.max() == 6.48828125
    assert np.array_equal(np.sort(values), np.sort(-values))
    assert np.sqrt(np.mean(values**2)) == pytest.approx(1.49998, abs=5e-6)


def test_a_table_needs_a_legal_rate(law: LutFp16) -> None:
    assert isinstance(get_codebook("lut_fp16"), LutFp16)
    with pytest.raises(FormatTypeError, match="lut_fp16 has a table for each K"):
        law.decode(ALL)
    for rate in ALL_RATES:
        if rate not in law.legal_rates:
            with pytest.raises(FormatValueError, match=f"lut_fp16 has no .*K = {rate}; legal K: 5, 6"):
                law.table_for(rate)
