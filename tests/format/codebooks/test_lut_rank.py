"""Holds the rank of a state to its law, step by step, and to being one to one at every K."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.codebooks import STATES
from trellis_format.codebooks.lut_rank import rank_of, ranks_of
from trellis_format.rates import Rate

EACH_K = pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])


def rank_by_text(state: int, bits: int) -> int:
    """The law over strings of binary digits, so that it shares no shift with the product."""
    text = f"{state:016b}"
    history, branch = text[: 16 - bits], text[16 - bits :]
    folded = int(history, 2) ^ int(history[:-11] or "0", 2)
    mixed = folded ^ int((f"{folded:016b}" + "0" * 11)[-(16 - bits) :], 2)
    hashed = f"{(0x3FA7D929 * mixed + 0xC928FD8E) % 2**32:032b}"
    symbol = int(branch[::-1], 2) ^ int(hashed[:bits], 2)
    return int(f"{symbol:0{bits}b}" + hashed[-(16 - bits) :], 2)


@EACH_K
def test_scalar_and_array_laws_are_the_written_one(bits: int) -> None:
    states = np.arange(STATES, dtype=np.uint16)
    ranks = ranks_of(states, Rate.of(bits))
    assert ranks.dtype == np.uint16
    for state in (*range(0, STATES, 251), STATES - 1):
        assert ranks[state] == rank_of(state, Rate.of(bits)) == rank_by_text(state, bits)


@EACH_K
def test_every_rank_has_one_state(bits: int) -> None:
    ranks = ranks_of(np.arange(STATES, dtype=np.uint16), Rate.of(bits))
    assert np.array_equal(np.sort(ranks), np.arange(STATES))


@EACH_K
def test_branches_of_a_history_are_a_power_of_two_apart(bits: int) -> None:
    for history in (0, 1, 77, (1 << 16 - bits) - 1):
        branches = [rank_of(history << bits | branch, Rate.of(bits)) for branch in range(1 << bits)]
        assert sorted(rank >> 16 - bits for rank in branches) == list(range(1 << bits))
        assert len({rank & (1 << 16 - bits) - 1 for rank in branches}) == 1
