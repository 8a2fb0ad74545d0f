"""Holds the epilogues' way through shared memory to the rotation law: every channel and row, in the right place."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cute.prefill_law import NumpyThreads, image_of, rows_in_order
from trellis_format.hadamard import hadamard
from trellis_kernels.cute.prefill_key import ROW_UNIT
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, output_channel

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import prefill_epilogue

SHARED = ROW_UNIT * prefill_epilogue._PITCH


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> NumpyThreads:
    """One warpgroup with the staged sums of 32 rows, and the image of a block of 32 rows."""
    threads = NumpyThreads(128, SHARED, out_bytes=ROW_UNIT * BLOCK_CHANNELS * 2, ways=2)
    monkeypatch.setattr(prefill_epilogue, "gpu", threads)
    for name, convert in (("Int64", np.int64), ("Float32", np.float32), ("Boolean", np.asarray)):
        monkeypatch.setattr(prefill_epilogue, name, convert)
    return threads


def fragments(rows: np.ndarray, threads: NumpyThreads):
    """`[32, 128]` sums as a function (column, index) to each thread's value, by the accumulators of `wgmma`."""
    g, t = threads.lane >> 2, threads.lane & 3

    def sums(column: int, index: int) -> np.ndarray:
        eight, half, odd = index // 4, index // 2 % 2, index % 2
        channel = [output_channel(w, lane, column, half) for w, lane in zip(threads.warp, g, strict=True)]
        return rows[8 * eight + 2 * t + odd, channel]

    return sums


def stage(rows: np.ndarray, threads: NumpyThreads, rotate: bool) -> None:
    prefill_epilogue._stage_sums(
        fragments(rows, threads), prefill_epilogue._staged_lane(threads.warp, threads.lane), rotate
    )


def staged(threads: NumpyThreads) -> np.ndarray:
    """What lies in shared memory as `[32, 128]`, channels in their natural order."""
    rows = threads.shared.reshape(ROW_UNIT, -1)
    places = np.zeros(BLOCK_CHANNELS, int)
    for w, g, c, h in np.ndindex(4, 8, 2, 2):
        places[output_channel(w, g, c, h)] = 64 * c + 32 * h + ((8 * w + g) ^ (16 * h))
    return rows[:, places]


@pytest.fixture
def rows() -> np.ndarray:
    """`[32, 128] float32`."""
    return np.random.default_rng(7).standard_normal((ROW_UNIT, BLOCK_CHANNELS)).astype(np.float32)


def test_staging_has_no_conflict_and_keeps_every_sum(group: NumpyThreads, rows: np.ndarray) -> None:
    group.ways = 1
    stage(rows, group, rotate=False)
    np.testing.assert_array_equal(staged(group), rows)


def test_a_rotation_is_two_butterflies_before_and_five_after(group: NumpyThreads, rows: np.ndarray) -> None:
    stage(rows, group, rotate=True)
    group.ways = 1
    s_row = prefill_epilogue._lane_row(0, group.warp, group.lane)
    values = prefill_epilogue._butterfly(prefill_epilogue._read_row(s_row), 5)
    prefill_epilogue._write_row(s_row, values)
    truth = hadamard(rows.astype(np.float64)) / prefill_epilogue._NORM
    np.testing.assert_allclose(staged(group), truth, rtol=0, atol=2e-5)


def test_four_channels_of_a_row_are_read_in_order(group: NumpyThreads, rows: np.ndarray) -> None:
    stage(rows, group, rotate=False)
    for index in range(8):
        s_read = prefill_epilogue._row_part(0, group.warp, group.lane)
        found = prefill_epilogue._read_part(s_read, index)
        for offset in range(4):
            expected = rows[8 * group.warp + index, 4 * group.lane + offset]
            np.testing.assert_array_equal(found[offset], expected)


@pytest.mark.parametrize("live", [32, 21, 1])
def test_an_image_has_the_rotated_rows_rounded_once(group: NumpyThreads, rows: np.ndarray, live: int) -> None:
    # rotating in: five butterflies over one lane's channels, then the two of the store
    stage(rows, group, rotate=False)
    s_row = prefill_epilogue._lane_row(0, group.warp, group.lane)
    values = prefill_epilogue._butterfly(prefill_epilogue._read_row(s_row), 5)
    prefill_epilogue._write_row(s_row, [value * np.float32(prefill_epilogue._NORM) for value in values])
    prefill_epilogue._store_image(0, 0, 0, 0, live, 0, ROW_UNIT, group.warp, group.lane)
    found = rows_in_order(group.out, 2, ROW_UNIT)
    truth = image_of(hadamard(rows.astype(np.float64)).astype(np.float16))
    np.testing.assert_allclose(
        found[:, :live].astype(np.float64), truth[:, :live].astype(np.float64), rtol=2**-10, atol=1e-6
    )
    untouched = found[:, live:].copy().view(np.uint8)
    assert np.all(untouched == 0xA5)


def test_scales_and_biases_are_those_of_the_lane(group: NumpyThreads) -> None:
    table = np.arange(64, dtype=np.float32)
    group.shared[:64] = table
    values = [np.full(128, index, np.float32) for index in range(32)]
    scaled = prefill_epilogue._scaled(values, np.zeros(128, int))
    np.testing.assert_array_equal(np.stack(scaled)[:, 0], np.arange(32) * table[:32])
    biased = prefill_epilogue._scaled(values, np.zeros(128, int), np.full(128, 128))
    np.testing.assert_array_equal(np.stack(biased)[:, 5], np.arange(32) * table[:32] + table[32:])
