"""Holds the rate byte to its table of nibbles and to its one order of planes."""

from __future__ import annotations

import pytest

from trellis_format.errors import FormatValueError
from trellis_format.rate_bytes import pack_rates, symmetric_rate, unpack_rates
from trellis_format.rates import ALL_RATES, Rate

NIBBLES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 1.5, 10: 2.5, 11: 3.5}
PAIRS = {0x22: (2, 2), 0x33: (3, 3), 0x24: (2, 4), 0x43: (4, 3), 0x44: (4, 4)}
SYMMETRIC = {1: 0x11, 2: 0x22, 3: 0x33, 4: 0x44, 5: 0x55, 6: 0x66, 7: 0x77, 8: 0x88, 1.5: 0x99, 2.5: 0xAA, 3.5: 0xBB}


@pytest.mark.parametrize(("byte", "bits"), PAIRS.items())
def test_the_low_plane_is_the_high_nibble(byte: int, bits: tuple[int, int]) -> None:
    low, high = map(Rate.of, bits)
    assert pack_rates(low, high) == byte
    assert unpack_rates(byte) == (low, high)


def test_every_pair_of_rates_has_its_own_byte() -> None:
    packed = {pack_rates(low, high): (low, high) for low in ALL_RATES for high in ALL_RATES}
    assert len(packed) == len(ALL_RATES) ** 2
    assert all(unpack_rates(byte) == pair for byte, pair in packed.items())


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_is_legal_or_refused(byte: int) -> None:
    wanted = [NIBBLES.get(nibble) for nibble in (byte >> 4, byte & 15)]
    if None in wanted:
        wrong = byte >> 4 if wanted[0] is None else byte & 15
        with pytest.raises(FormatValueError, match=f"rate byte 0x{byte:02X}: rate nibble {wrong} is illegal"):
            unpack_rates(byte)
    else:
        assert [rate.bits for rate in unpack_rates(byte)] == wanted


@pytest.mark.parametrize("byte", [-1, 256, 0x1133])
def test_a_rate_byte_is_a_byte(byte: int) -> None:
    with pytest.raises(FormatValueError, match=f"rate byte {byte} is outside 0..255"):
        unpack_rates(byte)


@pytest.mark.parametrize(("bits", "byte"), SYMMETRIC.items())
def test_equal_planes_are_one_rate(bits: float, byte: int) -> None:
    rate = Rate.of(bits)
    assert symmetric_rate(byte) == rate
    assert pack_rates(rate, rate) == byte == rate.nibble * 17


@pytest.mark.parametrize(("byte", "low", "high", "near"), [(0x24, "2", "4", "22"), (0xA3, "2.5", "3", "AA")])
def test_unequal_planes_are_refused_with_the_byte(byte: int, low: str, high: str, near: str) -> None:
    text = f"rate byte 0x{byte:02X} has K = {low} in the low and {high} in the high plane; only symmetric .*0x{near}"
    with pytest.raises(FormatValueError, match=text):
        symmetric_rate(byte)
