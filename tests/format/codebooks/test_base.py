"""Holds every registered codebook to itself: the scalar law, the array law, the table and the legal rates."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
import pytest

from trellis_format.codebooks import EXL3_CODEBOOKS, STATES, Codebook, StateCodebook, get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.rates import ALL_RATES, Rate

EACH = pytest.mark.parametrize("codebook", EXL3_CODEBOOKS.values(), ids=EXL3_CODEBOOKS)

# minimum, maximum, mean, standard deviation, distinct values, CRC-32 and SHA-256 of the table as little-endian fp16
STATISTICS = {
    "3inst": (-3.95703125, 3.97265625, 2.104e-04, 1.243711, 10598, 0x4C83D524,
              "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea"),
    "mcg": (-3.94921875, 3.94921875, -3.693e-05, 1.244112, 10746, 0xD2D13C52,
            "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9"),
    "mul1": (-3.453125, 3.34765625, -1.931e-03, 1.000310, 913, 0x2BDF05C5,
             "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8"),
}  # fmt: skip


def test_the_registry_has_these_under_their_own_names() -> None:
    assert list(EXL3_CODEBOOKS) == list(STATISTICS)
    assert all(codebook.name == name and get_codebook(name) is codebook for name, codebook in EXL3_CODEBOOKS.items())
    assert STATES == 65536


@pytest.mark.parametrize("name", ["", "MCG", "lut_e5m2", "mcg "])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(FormatValueError, match=f"unknown codebook '{name}'; known: 3inst, mcg, mul1"):
        get_codebook(name)


@EACH
def test_scalar_law_and_array_law_agree_on_every_state(codebook: StateCodebook) -> None:
    scalar = np.array([codebook.value(state) for state in range(STATES)])
    array = codebook.evaluate(np.arange(STATES, dtype=np.uint16))
    assert array.dtype == np.float16
    assert np.array_equal(array.astype(np.float64), scalar)
    assert np.array_equal(codebook.table.view(np.uint16), array.view(np.uint16))


@EACH
def test_the_table_is_the_published_one(codebook: StateCodebook) -> None:
    low, high, mean, deviation, distinct, crc, digest = STATISTICS[codebook.name]
    values = codebook.table.astype(np.float64)
    assert (values.min(), values.max()) == (low, high)
    assert values.mean() == pytest.approx(mean, abs=5e-7)
    assert values.std() == pytest.approx(deviation, abs=5e-7)
    assert len(np.unique(codebook.table)) == distinct
    stored = codebook.table.astype("<f2").tobytes()
    assert zlib.crc32(stored) == crc
    assert hashlib.sha256(stored).hexdigest() == digest


@EACH
def test_decode_looks_up_any_shape(codebook: StateCodebook) -> None:
    states = np.random.default_rng(0).integers(0, STATES, (3, 5, 7), dtype=np.uint16)
    decoded = codebook.decode(states)
    assert np.array_equal(decoded.view(np.uint16), codebook.evaluate(states).view(np.uint16))
    assert codebook.decode(states[:0]).shape == (0, 5, 7)


@EACH
def test_the_table_cannot_be_written(codebook: StateCodebook) -> None:
    with pytest.raises(ValueError, match="read-only"):
        codebook.table[0] = 1.0


@EACH
def test_no_value_is_subnormal_or_infinite(codebook: StateCodebook) -> None:
    magnitudes = np.abs(codebook.table.astype(np.float64))
    assert np.isfinite(magnitudes).all()
    assert magnitudes[magnitudes > 0].min() >= 2.0**-14


@EACH
@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_half_rates_are_mul1s_alone(codebook: StateCodebook, rate: Rate) -> None:
    if codebook.name == "mul1" or not rate.is_half:
        codebook.check_rate(rate)
        assert rate in codebook.legal_rates
    else:
        with pytest.raises(FormatValueError, match=f"codebook {codebook.name} has no half rate K = {rate}") as caught:
            codebook.check_rate(rate)
        assert "mul1" in str(caught.value)
        assert "legal K: 1, 2, 3, 4, 5, 6, 7, 8" in str(caught.value)


def test_markers_and_multipliers() -> None:
    known = {name: (codebook.marker, codebook.multiplier) for name, codebook in EXL3_CODEBOOKS.items()}
    assert known == {"3inst": (None, None), "mcg": ("mcg", 0xCBAC1FED), "mul1": ("mul1", 0x83DCD12D)}


def test_a_codebook_states_its_own_laws() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Codebook()  # type: ignore[abstract]
