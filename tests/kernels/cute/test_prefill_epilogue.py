"""Holds the epilogues' way through shared memory to the rotation law: every channel and row, in the right place."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cute.prefill_law import NumpyThreads, image_of, rows_in_order
from trellis_format.hadamard import hadamard
from trellis_kernels.cute.prefill_key import ROW_UNIT, PrefillGemmKey
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, output_channel

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import prefill_epilogue

PASS_ROWS = PrefillGemmKey.pass_rows
SHARED = PASS_ROWS * prefill_epilogue._PITCH
UNITS = PASS_ROWS // ROW_UNIT


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> NumpyThreads:
    """Both warpgroups with the staged sums of a pass, and the image of a block of as many rows."""
    threads = NumpyThreads(256, SHARED, out_bytes=PASS_ROWS * BLOCK_CHANNELS * 4)
    monkeypatch.setattr(prefill_epilogue, "gpu", threads)
    for name, convert in (("Int64", np.int64), ("Float32", np.float32), ("Boolean", np.asarray)):
        monkeypatch.setattr(prefill_epilogue, name, convert)
    return threads


def fragments(rows: np.ndarray, threads: NumpyThreads, unit: int):
    """`[128, 128]` sums as a function of the index to each thread's value of a unit, by the accumulators of `wgmma`."""
    g, t = threads.lane >> 2, threads.lane & 3
    group, warp = threads.warp >> 2, threads.warp & 3

    def sums(index: int) -> np.ndarray:
        eight, half, odd = index // 4, index // 2 % 2, index % 2
        channel = [output_channel(w, lane, c, half) for w, lane, c in zip(warp, g, group, strict=True)]
        return rows[ROW_UNIT * unit + 8 * eight + 2 * t + odd, channel]

    return sums


def stage(rows: np.ndarray, threads: NumpyThreads, rotate: bool) -> None:
    s_lane = prefill_epilogue._staged_lane(threads.warp, threads.lane)
    for unit in range(UNITS):
        prefill_epilogue._stage_unit(fragments(rows, threads, unit), s_lane, unit, rotate)


def read(threads: NumpyThreads) -> list[np.ndarray]:
    return prefill_epilogue._read_row(prefill_epilogue._lane_row(0, threads.warp, threads.lane))


def rows_of(values: list[np.ndarray], threads: NumpyThreads) -> np.ndarray:
    """Each lane's 64 values as `[128, 128]`, channels in their natural order."""
    rows = np.full((PASS_ROWS, BLOCK_CHANNELS), np.nan)
    row, half = 16 * threads.warp + (threads.lane & 15), threads.lane >> 4
    for run, index in np.ndindex(8, 8):
        rows[row, 16 * run + 8 * half + index] = values[prefill_epilogue._run_place(run, index)]
    return rows


@pytest.fixture
def rows() -> np.ndarray:
    """`[128, 128] float32`."""
    return np.random.default_rng(7).standard_normal((PASS_ROWS, BLOCK_CHANNELS)).astype(np.float32)


def test_staging_has_no_conflict_and_keeps_every_sum(threads: NumpyThreads, rows: np.ndarray) -> None:
    stage(rows, threads, rotate=False)
    np.testing.assert_array_equal(rows_of(read(threads), threads), rows)


def test_a_rotation_is_one_butterfly_before_and_six_after(threads: NumpyThreads, rows: np.ndarray) -> None:
    stage(rows, threads, rotate=True)
    found = rows_of(prefill_epilogue._butterfly(read(threads), 6), threads)
    np.testing.assert_allclose(found, hadamard(rows.astype(np.float64)) / prefill_epilogue._NORM, rtol=0, atol=2e-5)


@pytest.mark.parametrize("live", [128, 85, 1])
def test_an_image_has_the_rotated_rows_rounded_once(threads: NumpyThreads, rows: np.ndarray, live: int) -> None:
    stage(rows, threads, rotate=False)
    values = prefill_epilogue._rotated_in(read(threads), threads.lane)
    values = [value * np.float32(prefill_epilogue._NORM) for value in values]
    row = 16 * threads.warp + (threads.lane & 15)
    prefill_epilogue._store_image(values, 0, 0, row, PASS_ROWS, threads.lane >> 4, row < live)
    found = rows_in_order(threads.out[: PASS_ROWS * BLOCK_CHANNELS * 2], 2, PASS_ROWS)
    truth = image_of(hadamard(rows.astype(np.float64)).astype(np.float16))
    np.testing.assert_allclose(
        found[:, :live].astype(np.float64), truth[:, :live].astype(np.float64), rtol=2**-10, atol=1e-6
    )
    assert np.all(found[:, live:].copy().view(np.uint8) == 0xA5)


def test_a_row_of_floats_is_stored_in_order(threads: NumpyThreads, rows: np.ndarray) -> None:
    stage(rows, threads, rotate=False)
    row = 16 * threads.warp + (threads.lane & 15)
    prefill_epilogue._store_floats(read(threads), row * (BLOCK_CHANNELS * 4), threads.lane >> 4, row < 100)
    found = threads.out.view(np.float32).reshape(PASS_ROWS, BLOCK_CHANNELS)
    np.testing.assert_array_equal(found[:100], rows[:100])
    assert np.all(found[100:].copy().view(np.uint8) == 0xA5)


def test_rows_of_halves_go_whole_to_the_rows_of_their_routes(
    threads: NumpyThreads, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, routes = 100, np.random.default_rng(9).permutation(PASS_ROWS)
    monkeypatch.setattr(prefill_epilogue, "primitives", threads)
    monkeypatch.setattr(prefill_epilogue.cutlass, "min", np.minimum)
    s_routes = SHARED
    threads.shared = np.concatenate([threads.shared, routes.astype(np.int32).view(np.float32)])
    stage(rows, threads, rotate=False)
    values = read(threads)
    first_row = 16 * threads.warp
    half = threads.lane >> 4
    prefill_epilogue._stage_halves(values, (first_row + (threads.lane & 15)) * prefill_epilogue._PITCH, half)
    row_bytes = BLOCK_CHANNELS * 2
    prefill_epilogue._write_halves(
        first_row * prefill_epilogue._PITCH, s_routes + first_row * 4, 0, row_bytes, live - first_row, threads.lane
    )
    found = threads.out[: PASS_ROWS * row_bytes].view(np.float16).reshape(PASS_ROWS, BLOCK_CHANNELS)
    np.testing.assert_array_equal(found[routes[:live]], rows[:live].astype(np.float16))
    assert np.all(found[routes[live:]].copy().view(np.uint8) == 0xA5)


def test_scales_and_biases_are_those_of_the_channel(threads: NumpyThreads, rows: np.ndarray) -> None:
    factors, addends = np.random.default_rng(8).standard_normal((2, BLOCK_CHANNELS)).astype(np.float32)
    stage(rows, threads, rotate=False)
    values = read(threads)
    for first, table in ((0, factors), (BLOCK_CHANNELS, addends)):
        by_half = table.reshape(8, 2, 8).transpose(1, 0, 2).reshape(-1)  # channel 16 run + 8 half + index
        threads.shared[first : first + BLOCK_CHANNELS] = by_half
    s_table = (threads.lane >> 4) * prefill_epilogue._HALF_BYTES
    threads.ways = 2  # of a broadcast: lanes 16 apart read different tables
    scaled = prefill_epilogue._scaled(values, s_table)
    np.testing.assert_array_equal(rows_of(scaled, threads), rows * factors)
    biased = prefill_epilogue._scaled(values, s_table, s_table + BLOCK_CHANNELS * 4)
    expected = (rows.astype(np.float64) * factors + addends).astype(np.float32)
    np.testing.assert_array_equal(rows_of(biased, threads), expected)
