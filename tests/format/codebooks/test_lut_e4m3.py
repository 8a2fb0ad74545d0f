"""Holds lut_e4m3 to its conformance hashes, and the array law to the scalar one on every state."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from trellis_format.codebooks import CODEBOOKS, EXL3_CODEBOOKS, STATES, get_codebook
from trellis_format.codebooks.lut_e4m3 import LutE4M3
from trellis_format.codebooks.lut_rank import rank_of
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import ALL_RATES, Rate

DIRECT = {
    2: ("62027916386245a84c86156a0a08b6cf07e41548871af0e56fb40780558f6293", "469137b8b03ebe2f"),
    3: ("afe7b3633e7d243b00b379b18ec4dca573722b3727cafef47fcb6470d7e7e6c9", "3db02ebe469137b8"),
    4: ("5a9620f0c4d8f0a60d0b6fbea921dcecbd193e6febf31043aaa6403c20389c2f", "3ab425c241a933bb"),
}
ALL = np.arange(STATES, dtype=np.uint16)


@pytest.fixture(name="law")
def _law() -> LutE4M3:
    return LutE4M3()


def test_compact_table_has_its_hash(law: LutE4M3) -> None:
    assert law.compact_bytes.shape == (4096,)
    digest = hashlib.sha256(law.compact_bytes.tobytes()).hexdigest()
    assert digest == "cca11fe5744c9c93a34f4217f342fbc0f74ecc8a007c076582424a505fc9da5e"


@pytest.mark.parametrize("bits", DIRECT)
def test_direct_tables_have_their_hashes(law: LutE4M3, bits: int) -> None:
    table = law.evaluate_bytes(ALL, Rate.of(bits)).tobytes()
    assert (hashlib.sha256(table).hexdigest(), table[:8].hex()) == DIRECT[bits]


def test_joined_tables_have_their_hash(law: LutE4M3) -> None:
    joined = b"".join(law.evaluate_bytes(ALL, rate).tobytes() for rate in law.legal_rates)
    assert hashlib.sha256(joined).hexdigest() == "24f49a880d70c223573ad2f9ded95361a91e04a93e2b87cac772ebf896c02ab1"


def e4m3_by_text(byte: int) -> float:
    digits = f"{byte:08b}"
    exponent, mantissa = int(digits[1:5], 2), int(digits[5:], 2)
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if digits[0] == "1" else value


@pytest.mark.parametrize("bits", DIRECT)
def test_scalar_law_array_law_and_table_agree_on_every_state(law: LutE4M3, bits: int) -> None:
    rate = Rate.of(bits)
    scalar = np.array([law.value(state, rate) for state in range(STATES)])
    assert np.array_equal(law.evaluate(ALL, rate).astype(np.float64), scalar)
    assert np.array_equal(law.table_for(rate).view(np.uint16), law.evaluate(ALL, rate).view(np.uint16))
    written = [e4m3_by_text(int(law.compact_bytes[rank_of(state, rate) // 16])) for state in range(0, STATES, 97)]
    assert written == scalar[::97].tolist()


@pytest.mark.parametrize("bits", DIRECT)
def test_range_and_mean_square(law: LutE4M3, bits: int) -> None:
    values = law.table_for(Rate.of(bits)).astype(np.float64)
    assert (values.min(), values.max()) == (-5.5, 5.5)
    assert np.mean(values**2) == pytest.approx(2.2458, abs=5e-5)


def test_a_table_needs_a_legal_rate(law: LutE4M3) -> None:
    with pytest.raises(FormatTypeError, match="lut_e4m3 has a table for each K; give the rate"):
        law.table_for()
    for rate in ALL_RATES:
        if rate not in law.legal_rates:
            with pytest.raises(FormatValueError, match=f"lut_e4m3 has no .*K = {rate}; legal K: 2, 3, 4"):
                law.table_for(rate)


def test_decode_looks_up_by_rate_and_tables_are_read_only(law: LutE4M3) -> None:
    states = np.random.default_rng(1).integers(0, STATES, (3, 7), dtype=np.uint16)
    for rate in law.legal_rates:
        assert np.array_equal(law.decode(states, rate), law.evaluate(states, rate))
        with pytest.raises(ValueError, match="read-only"):
            law.table_for(rate)[0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        law.compact_bytes[0] = 1


def test_table_codebooks_are_registered_but_not_for_exl3() -> None:
    assert set(CODEBOOKS) - set(EXL3_CODEBOOKS) == {"lut_e4m3", "lut_fp16"}
    assert isinstance(get_codebook("lut_e4m3"), LutE4M3)
    assert [name for name, codebook in CODEBOOKS.items() if codebook.in_exl3] == list(EXL3_CODEBOOKS)
