"""Holds the rate to the arithmetic of a tile, for every legal K and around it."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import ALL_RATES, STATE_BITS, TILE, TILE_WEIGHTS, Rate

LEGAL = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
RATES = pytest.mark.parametrize("rate", ALL_RATES, ids=str)


def test_the_legal_rates_are_these_in_ascending_order() -> None:
    assert tuple(rate.bits for rate in ALL_RATES) == LEGAL
    assert all(low < high for low, high in itertools.pairwise(ALL_RATES))


def test_a_tile_is_256_weights_with_16_bit_states() -> None:
    assert (TILE, TILE_WEIGHTS, STATE_BITS) == (16, 256, 16)


@RATES
def test_sizes_of_a_tile_follow_from_k(rate: Rate) -> None:
    bits = Fraction(rate.half_bits, 2)
    assert rate.ring_bits == 256 * bits
    assert rate.tile_bytes == 32 * bits
    assert rate.tile_words16 == 16 * bits
    assert rate.tile_words32 == 8 * bits
    assert rate.tile_bytes * 8 == rate.ring_bits


@RATES
def test_every_name_of_a_rate_leads_back_to_it(rate: Rate) -> None:
    assert Rate.of(rate.bits) == Rate.of(str(rate)) == Rate.of(Fraction(rate.half_bits, 2)) == rate
    assert Rate.from_width(rate.tile_words16) == rate
    assert Rate.from_nibble(rate.nibble) == rate
    assert eval(repr(rate)) == rate
    assert rate.is_half == (rate.bits % 1 != 0)


def test_nibbles_are_those_of_the_rate_byte_table() -> None:
    table = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 1.5, 10: 2.5, 11: 3.5}
    assert {nibble: Rate.from_nibble(nibble).bits for nibble in table} == table
    symmetric = {1.5: 0x99, 2.5: 0xAA, 3.5: 0xBB, 2: 0x22, 6: 0x66}
    assert {bits: Rate.of(bits).nibble * 17 for bits in symmetric} == symmetric


@pytest.mark.parametrize("nibble", [0, 12, 13, 14, 15, -1, 16])
def test_other_nibbles_are_illegal(nibble: int) -> None:
    with pytest.raises(FormatValueError, match=rf"rate nibble {nibble} is illegal"):
        Rate.from_nibble(nibble)


@RATES
def test_the_ring_advances_by_whole_bits_and_closes(rate: Rate) -> None:
    advances, ends = rate.advances(), rate.ends()
    low = int(rate.bits)
    assert advances.shape == ends.shape == (TILE_WEIGHTS,)
    assert set(advances[::2]) == {low}
    assert set(advances[1::2]) == {low + (1 if rate.is_half else 0)}
    assert ends[0] == advances[0]
    assert np.array_equal(np.diff(ends), advances[1:])
    assert ends[-1] == rate.ring_bits


def test_half_rates_advance_the_smaller_step_first() -> None:
    assert Rate.of(2.5).advances()[:4].tolist() == [2, 3, 2, 3]
    assert Rate.of(1.5).ends()[:4].tolist() == [1, 3, 4, 6]


@given(st.integers(-40, 400))
def test_a_width_is_legal_only_if_it_is_16_k(width: int) -> None:
    legal = {round(16 * bits): bits for bits in LEGAL}
    if width in legal:
        assert Rate.from_width(width).bits == legal[width]
    else:
        with pytest.raises(FormatValueError, match="bitrate") as caught:
            Rate.from_width(width)
        assert str(width) in str(caught.value)
        assert "16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128" in str(caught.value)


@pytest.mark.parametrize("bits", ["1e400", "1e6000", "-1e400", 2**64])
def test_a_number_of_any_size_is_refused_as_a_rate(bits: str | int) -> None:
    with pytest.raises(FormatValueError, match=r"binary digits is not legal; legal K: 1, 1\.5"):
        Rate.of(bits)


@given(st.integers(-5, 40))
def test_half_bits_outside_the_set_are_refused(half_bits: int) -> None:
    if half_bits / 2 in LEGAL:
        assert Rate(half_bits).half_bits == half_bits
    else:
        with pytest.raises(FormatValueError, match=r"legal K: 1, 1\.5, 2, 2\.5, 3, 3\.5, 4, 5, 6, 7, 8"):
            Rate(half_bits)


@given(st.floats() | st.text(max_size=12) | st.fractions())
def test_of_gives_a_legal_rate_or_a_format_error(bits: float | str | Fraction) -> None:
    try:
        doubled = Fraction(bits) * 2
    except (ValueError, ArithmeticError):
        doubled = Fraction(0)
    if doubled.denominator == 1 and doubled / 2 in LEGAL:
        assert Rate.of(bits).half_bits == doubled
    else:
        with pytest.raises(FormatValueError, match="bitrate"):
            Rate.of(bits)


@pytest.mark.parametrize("bits", [float("nan"), float("inf"), "1/0", "three", None, [], 2.25, 0, -1, 4.5, 9])
def test_what_is_no_rate_is_refused(bits: object) -> None:
    with pytest.raises(FormatValueError, match="bitrate"):
        Rate.of(bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("half_bits", [6.0, "6", True, None, np.int64(6)])
def test_half_bits_must_be_a_python_int(half_bits: object) -> None:
    with pytest.raises(FormatTypeError, match=f"must be an int, got {type(half_bits).__name__}"):
        Rate(half_bits)  # type: ignore[arg-type]


def test_rates_compare_exactly_and_hash() -> None:
    assert Rate.of(2) < Rate.of(2.5) < Rate.of(3)
    assert len({Rate(5), Rate.of(2.5), Rate.from_width(40)}) == 1
    assert f"{Rate.of(3.5)} {Rate.of(4)}" == "3.5 4"
