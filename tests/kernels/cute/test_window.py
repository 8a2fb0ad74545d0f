"""Holds the windows that lanes cut to the ring law of trellis-format and to integer arithmetic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import unpack_states
from trellis_kernels.cute.window import LANES, cut_windows, lane_geometry, plan_cuts, shift_count

TWICE = 0x00010001


def funnel_right(low: int, high: int | None, shift: int) -> int:
    return (low | (high or 0) << 32) >> shift & 0xFFFFFFFF


def permute(low: int, high: int, selector: int) -> int:
    source = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * nibble & 7] for nibble in range(4)), "little")


def cut(number: int, words: int, lags: list[int]) -> list[int]:
    digits = [number >> 32 * index & 0xFFFFFFFF for index in range(words)]
    return cut_windows(digits, plan_cuts(lags), funnel_right=funnel_right, permute=permute)


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_every_lane_cuts_the_states_of_its_positions(rate: Rate) -> None:
    rng = np.random.default_rng(rate.half_bits)
    tile = rng.integers(-(2**15), 2**15, rate.tile_words16, dtype=np.int16)
    ring = [int(word) for word in tile.view("<u4")]
    geometry = lane_geometry(rate)
    found = []
    for lane in range(LANES):
        end = geometry.lane_bits * (lane + 1)
        raw = [ring[((end - 1) // 32 - back) % len(ring)] for back in range(geometry.raw_words)]
        number = sum(word << 32 * index for index, word in enumerate(raw)) >> (-end % 32)
        found += cut(number & (1 << 32 * geometry.aligned_words) - 1, geometry.aligned_words, list(geometry.lags))
    assert found == [int(state) * TWICE for state in unpack_states(tile, rate)]


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_lane_reads_no_word_that_it_does_not_need(rate: Rate) -> None:
    geometry = lane_geometry(rate)
    spans = [-geometry.lane_bits * (lane + 1) % 32 + geometry.lags[0] + 16 for lane in range(LANES)]
    assert 32 * (geometry.raw_words - 1) < max(spans) <= 32 * geometry.raw_words
    assert 32 * (geometry.aligned_words - 1) < geometry.lags[0] + 16 <= 32 * geometry.aligned_words
    assert geometry.is_aligned == (rate.half_bits in (8, 16))


@given(st.integers(0, 2**128 - 1), st.lists(st.integers(0, 112), min_size=1, max_size=16))
def test_any_set_of_windows_is_cut_exactly(number: int, lags: list[int]) -> None:
    assert cut(number, 4, lags) == [(number >> lag & 0xFFFF) * TWICE for lag in lags]


@given(st.sets(st.integers(0, 48), min_size=1, max_size=5))
def test_plan_uses_as_few_shifts_as_there_can_be(lags: set[int]) -> None:
    unaligned = {lag for lag in lags if lag % 8}
    starts = sorted({lag - back for lag in unaligned for back in (0, 8, 16) if lag >= back})

    def serves(chosen: tuple[int, ...]) -> bool:
        # a window is inside one shifted register, or its low byte is the top byte of one and its high byte the next's
        have = set(chosen)
        return all(have & {lag, lag - 8, lag - 16} or {lag - 24, lag + 8} <= have for lag in unaligned)

    fewest = next(n for n in range(len(starts) + 1) if any(map(serves, itertools.combinations(starts, n))))
    assert shift_count(plan_cuts(sorted(lags))) == fewest


@pytest.mark.parametrize(
    ("bits", "shifts"), [(1, 7), (1.5, 5), (2, 3), (2.5, 4), (3, 7), (3.5, 7), (4, 2), (5, 7), (6, 6), (7, 7), (8, 0)]
)
def test_shifts_of_each_rate(bits: float, shifts: int) -> None:
    assert shift_count(plan_cuts(lane_geometry(Rate.of(bits)).lags)) == shifts
