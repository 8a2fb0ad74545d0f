"""Holds the device side of the codebooks with a table to the numpy law, over all states at every K."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.codebooks import CODEBOOKS, STATES
from trellis_format.rates import Rate

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.arguments import FULL_TABLE_CODEBOOK, FULL_TABLE_RATE
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS, table_codebook

CASES = [
    *((name, "compact", rate) for name in TABLE_CODEBOOKS for rate in CODEBOOKS[name].legal_rates),
    (FULL_TABLE_CODEBOOK, "full", FULL_TABLE_RATE),
]


@pytest.mark.parametrize(("name", "form", "rate"), CASES)
def test_all_states_decode_to_the_law(numpy_table, name: str, form: str, rate: Rate) -> None:
    law, s_table = numpy_table(name, form)
    states = np.arange(STATES, dtype=np.uint32) * np.uint32(0x00010001)
    found = law.decode_pair(states, states[::-1].copy(), rate, s_table).view(np.uint16).reshape(-1, 2)
    wanted = CODEBOOKS[name].table_for(rate).view(np.uint16)
    np.testing.assert_array_equal(found[:, 0], wanted)
    np.testing.assert_array_equal(found[:, 1], wanted[::-1])


@pytest.mark.parametrize(
    ("name", "form", "most_bytes"),
    [("lut_e4m3", "compact", 8192), ("lut_e4m3", "full", 65536), ("lut_fp16", "compact", 512)],
)
def test_tables_are_whole_pieces_of_16_bytes(name: str, form: str, most_bytes: int) -> None:
    words = table_codebook(name, form).words
    assert words.dtype == np.uint32
    assert words.nbytes % 16 == 0
    assert words.nbytes <= most_bytes


def test_codebooks_of_arithmetic_have_no_table() -> None:
    assert [table_codebook(name, "compact") for name in ("3inst", "mcg", "mul1")] == [None] * 3
