"""Holds a lane's share to the ring: every window, for every rate, from the fewest shifted words."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import unpack_states
from trellis_kernels.cute.gemm_share import cover_windows, cut_in_turn, hash_in_turn, share_of, shift_counts
from trellis_kernels.cute.window import plan_cuts, shift_count

LANES = np.arange(32)
GROUPS, QUARTERS = LANES // 4, LANES % 4


@pytest.mark.parametrize("cost", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_lanes_cut_every_state_of_a_strip(rate: Rate, cost: float, numpy_warp) -> None:
    share = share_of(rate, cost)
    tiles = np.random.default_rng(rate.half_bits).integers(-(2**15), 2**15, (4, rate.tile_words16), dtype=np.int16)
    words = np.ascontiguousarray(tiles).view(np.uint32)
    strip = words.reshape(-1)
    states = unpack_states(tiles, rate).astype(np.int64) & 0xFFFF
    for piece in range(share.pieces):
        first = GROUPS * share.words + piece * rate.tile_words32
        own = [strip[first + index] for index in range(share.words)]
        before = LANES ^ 4 if share.is_wide else (LANES - 4) % 32
        found = cut_in_turn(
            [*reversed(own), own[-1][before]],
            share.windows,
            funnel_right=numpy_warp.funnel_right,
            multiply=lambda word, factor: word * np.uint32(factor),
            permute=numpy_warp.permute_bytes,
        )
        for place, twice in enumerate(found):
            index, position = divmod(place, 32)
            channel = np.array([share.column(piece, index, g) for g in GROUPS])
            expected = states[channel // 16, (channel % 16) * 32 + position]
            np.testing.assert_array_equal(twice, expected | expected << 16)


@pytest.mark.parametrize("cost", [0.4, 1.0])
@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_windows_right_below_another_are_hashed_without_a_permute(rate: Rate, cost: float, numpy_warp) -> None:
    share = share_of(rate, cost)
    lags = [share.words * 32 - int(end) for end in rate.ends()[: len(share.windows)]]
    words = list(np.random.default_rng(1).integers(0, 2**32, share.words + 1, dtype=np.uint32)[:, None])
    number = sum(int(word[0]) << 32 * index for index, word in enumerate(words))
    permutes, halves = [], []

    def permute(low, high, selector):
        permutes.append(selector)
        return numpy_warp.permute_bytes(low, high, selector)

    def hash_half(word: np.ndarray, half: int) -> np.ndarray:
        halves.append(half)
        return numpy_warp.take_half(word, half) * np.uint32(factor) + np.uint32(addend)

    factor, addend = 0x9E3779B1, 0x1234567
    found = hash_in_turn(
        words,
        share,
        funnel_right=numpy_warp.funnel_right,
        multiply=lambda word, by: word * np.uint32(by),
        permute=permute,
        hash_twice=lambda twice: (twice & np.uint32(0xFFFF)) * np.uint32(factor) + np.uint32(addend),
        hash_below=lambda word, above: numpy_warp.multiply_add_word(
            above, -(1 << 16), word * np.uint32(factor) + np.uint32(addend * (1 + (1 << 16)) % 2**32)
        ),
        hash_half=hash_half,
    )
    for lag, value in zip(lags, found, strict=True):
        assert int(value[0]) == ((number >> lag) % 2**16 * factor + addend) % 2**32
    spared = len(lags) - len(permutes) - len(halves)
    assert spared == sum(partner is not None for partner in share.partners)
    assert len(halves) > len(lags) // 20
    assert spared > 0 or rate.half_bits not in (2, 4, 8, 16)  # K divides 16, so states 16 bits apart are positions


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_columns_cover_the_strip_once(rate: Rate) -> None:
    share = share_of(rate)
    channels = [
        share.column(piece, index, g) + half
        for piece in range(share.pieces)
        for index in range(share.columns)
        for g in range(8)
        for half in (0, 8)
    ]
    assert sorted(channels) == list(range(64))
    assert share.step_words * 32 * 32 == 64 * 64 * rate.half_bits // 2


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_cover_takes_no_more_shifts_than_the_plan_of_single_registers(rate: Rate) -> None:
    lags = tuple(int(lag) for lag in rate.ends()[127] - rate.ends()[:128])
    assert shift_counts(cover_windows(lags))[0] <= shift_count(plan_cuts(lags))


def test_three_bits_take_three_shifts_for_five_windows() -> None:
    # seven of eight windows are off a byte; a shifted word holds one and a half of them
    assert shift_counts(share_of(Rate.of(3)).windows) == (77, 0)
    # where multiplications are cheap, one of three shifts becomes one, and a few more words are made in all
    shifts, products = shift_counts(share_of(Rate.of(3), 0.4).windows)
    assert shifts < 60
    assert 77 <= shifts + products <= 86
