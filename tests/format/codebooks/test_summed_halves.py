"""Holds 3inst and mcg to worked examples, step by step."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from trellis_format.codebooks.summed_halves import FIELD_MASK, FIELD_XOR, MCG, ThreeInst

# state, hash x, field y, fp16 of the low half, fp16 of the high half, bits of the sum, value
EXAMPLES = {
    "3inst": """
        0000 03D45AA4 38B431C4  0.18017578125   0.587890625      3A25  0.76806640625
        0001 0925D716 3245BC76 -1.115234375     0.1959228515625  BB5B -0.91943359375
        0002 0E775388 351738E8  0.61328125      0.318115234375   3B74  0.931640625
        00FF 4FFF5032 349F3B52  0.9150390625    0.288818359375   3CD1  1.2041015625
        1234 D321A5CC B841BEAC -1.66796875     -0.53173828125    C066 -2.19921875
        7FFF BCBBDE32 B7DBB552 -0.33251953125  -0.490966796875   BA96 -0.8232421875
        8000 C20D5AA4 B96D31C4  0.18017578125  -0.67822265625    B7F8 -0.498046875
        ABCD B43527EE BF553C8E  1.138671875    -1.8330078125     B98E -0.6943359375
        BEEF 75442512 3E243E72  1.611328125     1.53515625       424B  3.146484375
        FFFF 7AF4DE32 3194B552 -0.33251953125   0.17431640625    B110 -0.158203125
    """,
    "mcg": """
        0000 00000000 3B603B60  0.921875        0.921875         3F60  1.84375
        0001 CBAC1FED B0CC348D  0.284423828125 -0.14990234375    304E  0.134521484375
        0002 97583FDA BC3834BA  0.29541015625  -1.0546875        BA13 -0.75927734375
        00FF E073CD13 BB13B673 -0.403076171875 -0.88427734375    BD26 -1.287109375
        1234 79352624 32553D44  1.31640625      0.1978759765625  3E0F  1.5146484375
        7FFF 444A6013 3F2A3B73  0.93115234375   1.791015625      4172  2.72265625
        8000 0FF68000 3496BB60 -0.921875        0.28662109375    B915 -0.63525390625
        ABCD 1228DFC9 3948B4A9 -0.291259765625  0.66015625       35E7  0.368896484375
        BEEF E563B443 BE03BF23 -1.7841796875   -1.5029296875     C293 -3.287109375
        FFFF 5440E013 3F20BB73 -0.93115234375   1.78125          3ACD  0.85009765625
    """,
}
CODEBOOKS = {"3inst": ThreeInst(), "mcg": MCG()}
CASES = [(name, *line.split()) for name, text in EXAMPLES.items() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("name", "state", "hashed", "field", "low", "high", "bits", "value"), CASES)
def test_worked_examples(
    name: str, state: str, hashed: str, field: str, low: str, high: str, bits: str, value: str
) -> None:
    codebook = CODEBOOKS[name]
    x = (int(state, 16) * codebook.hash_multiplier + codebook.hash_addend) % 2**32
    assert x == int(hashed, 16)
    y = x & FIELD_MASK ^ FIELD_XOR
    assert y == int(field, 16)
    assert struct.unpack("<2e", struct.pack("<I", y)) == (float(low), float(high))
    assert codebook.value(int(state, 16)) == float(value)
    decoded = codebook.evaluate(np.array([int(state, 16)], np.uint16))
    assert f"{decoded.view(np.uint16)[0]:04X}" == bits
    assert float(decoded[0]) == float(value)


@pytest.mark.parametrize("codebook", CODEBOOKS.values(), ids=CODEBOOKS)
def test_halves_lie_between_an_eighth_and_two(codebook: ThreeInst) -> None:
    states = np.arange(65536, dtype=np.uint64)
    hashed = (states * codebook.hash_multiplier + codebook.hash_addend).astype(np.uint32)
    halves = ((hashed & np.uint32(FIELD_MASK)) ^ np.uint32(FIELD_XOR)).view(np.float16)
    magnitudes = np.abs(halves.astype(np.float64))
    assert magnitudes.min() >= 0.125
    assert magnitudes.max() < 2.0


@pytest.mark.parametrize("codebook", CODEBOOKS.values(), ids=CODEBOOKS)
def test_the_sum_is_rounded_once_to_nearest_even(codebook: ThreeInst) -> None:
    for state in range(0, 65536, 97):
        field = (state * codebook.hash_multiplier + codebook.hash_addend) & FIELD_MASK ^ FIELD_XOR
        low, high = np.frombuffer(struct.pack("<I", field), "<f2")
        assert codebook.value(state) == float(np.float16(low + high))


def test_arithmetic_wraps_for_any_integer_state_array() -> None:
    states = np.array([0xFFFF, 0x8000], np.uint16)
    assert MCG().evaluate(states).tolist() == [0.85009765625, -0.63525390625]
    assert ThreeInst().evaluate(states).tolist() == [-0.158203125, -0.498046875]
