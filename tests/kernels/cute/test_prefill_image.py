"""Holds the image kernel's lanes to the law of the image: rotation, order of channels and swizzle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cute.prefill_law import NumpyThreads, image_of, rows_in_order
from trellis_format.hadamard import hadamard
from trellis_kernels.cute.prefill_key import PrefillImageKey
from trellis_kernels.cute.prefill_share import PANEL_CHANNELS, PANEL_ROW_BYTES

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import prefill_image
from trellis_kernels.cute.report import report_kernel

CHANNELS = 1024  # of a warp
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> NumpyThreads:
    """One warp whose output has the image of eight rows."""
    threads = NumpyThreads(32, out_bytes=8 * 2 * CHANNELS)
    monkeypatch.setattr(prefill_image, "gpu", threads)
    for name, convert in (("Int64", np.int64), ("Int32", np.int64), ("Float32", np.float32)):
        monkeypatch.setattr(prefill_image, name, convert)
    return threads


def lane_channels(lane: np.ndarray) -> np.ndarray:
    """First channel of each lane."""
    return lane // 2 * PANEL_CHANNELS + 8 * (lane & 1)


def lane_words(row: torch.Tensor, lane: np.ndarray) -> list[np.ndarray]:
    """What the loads of `_load_row` return: eight channels of every 16, as words."""
    flat = row.contiguous().view(torch.uint8).numpy().view(np.uint32)
    per_word = row.numel() // flat.size
    first = lane_channels(lane)
    return [flat[(first + 16 * t) // per_word + index] for t in range(4) for index in range(8 // per_word)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [CHANNELS, 648])
def test_a_warp_writes_the_image_of_its_rows(warp: NumpyThreads, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    rows = torch.from_numpy(rng.standard_normal((8, CHANNELS))).to(DTYPES[dtype])
    scales = rng.uniform(0.5, 2.0, CHANNELS).astype(np.float16).astype(np.float32)
    first = lane_channels(warp.lane)
    factors = [scales[first + 16 * t + index] for t in range(4) for index in range(8)]
    poisoned = rows.clone()
    poisoned[:, width:] = float("nan")
    for index in range(8):
        words = lane_words(poisoned[index], warp.lane)
        values = prefill_image._row_values(words, first, width, dtype)
        rotated = prefill_image._rotate([a * b for a, b in zip(values, factors, strict=True)], warp.lane)
        g_row = (warp.lane // 2 * 8 + index) * PANEL_ROW_BYTES
        prefill_image._store_lane(g_row, rotated, warp.lane & 1, index, np.ones(32, bool))
    exact = rows.double().numpy()
    exact[:, width:] = 0.0
    truth = image_of(hadamard(exact * scales.astype(np.float64)).astype(np.float16))
    found = rows_in_order(warp.out, CHANNELS // PANEL_CHANNELS, 8)
    np.testing.assert_allclose(found.astype(np.float64), truth.astype(np.float64), rtol=2**-10, atol=2e-6)


def test_rows_as_they_are_keep_their_bits(warp: NumpyThreads) -> None:
    rows = np.random.default_rng(1).standard_normal((8, CHANNELS)).astype(np.float16)
    for index in range(8):
        words = lane_words(torch.from_numpy(rows[index]), warp.lane)
        values = prefill_image._row_values(words, lane_channels(warp.lane), CHANNELS, "float16")
        g_row = (warp.lane // 2 * 8 + index) * PANEL_ROW_BYTES
        prefill_image._store_lane(g_row, values, warp.lane & 1, index, np.ones(32, bool))
    found = rows_in_order(warp.out, CHANNELS // PANEL_CHANNELS, 8)
    np.testing.assert_array_equal(found.view(np.uint16), image_of(rows).view(np.uint16))


def test_dead_rows_are_not_written(warp: NumpyThreads) -> None:
    values = [np.ones(32, np.float32)] * 32
    prefill_image._store_lane(warp.lane // 2 * 1024, values, warp.lane & 1, 0, np.zeros(32, bool))
    assert np.all(warp.out == 0xA5)


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_binary_has_no_stack(images: int, dtype: str) -> None:
    report = report_kernel(PrefillImageKey("sm_90a", dtype, images))
    assert report.error is None
    assert report.is_good, report
