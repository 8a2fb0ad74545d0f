"""Holds the image kernel's lanes to the law of the image: rotation, order of channels and swizzle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cute.prefill_law import NumpyThreads, image_of, rows_in_order
from trellis_format.hadamard import hadamard
from trellis_kernels.cute.prefill_key import PrefillImageKey

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import prefill_image
from trellis_kernels.cute.report import report_kernel

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS, CHANNELS = 16, 128  # of a unit


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> NumpyThreads:
    """One warp with the shared memory of a unit's rows, and an output that has the image of a unit."""
    threads = NumpyThreads(32, 1 << 16, out_bytes=ROWS * CHANNELS * 2)
    for name in ("gpu", "primitives"):
        monkeypatch.setattr(prefill_image, name, threads)
    for name, convert in (("Int64", np.int64), ("Int32", np.int64), ("Float32", np.float32)):
        monkeypatch.setattr(prefill_image, name, convert)
    monkeypatch.setattr(prefill_image.cutlass, "Boolean", np.asarray)
    return threads


def place_rows(warp: NumpyThreads, rows: torch.Tensor, dtype: str) -> None:
    """Write rows to shared memory as the copies of `_copy_rows` do."""
    pitch = prefill_image.row_pitch(dtype)
    shared = warp.shared.view(np.uint8)
    for index, row in enumerate(rows):
        data = row.contiguous().view(torch.uint8).numpy()
        shared[index * pitch : index * pitch + data.size] = data


def image_of_unit(warp: NumpyThreads, values: list[np.ndarray], rows: int) -> np.ndarray:
    """Stage values and write them out, as `[2, 16, 64] float16`."""
    prefill_image._stage_image(prefill_image._pieces(values), 0, warp.lane)
    prefill_image._write_image(0, 0, ROWS * 128, rows, warp.lane)
    return rows_in_order(warp.out, 2, ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_warp_writes_the_image_of_its_rows(warp: NumpyThreads, dtype: str) -> None:
    rng = np.random.default_rng(3)
    rows = torch.from_numpy(rng.standard_normal((ROWS, CHANNELS))).to(DTYPES[dtype])
    scales = rng.uniform(0.5, 2.0, (ROWS // 8, CHANNELS)).astype(np.float16)
    place_rows(warp, rows, dtype)
    s_scales = ROWS * prefill_image.row_pitch(dtype)
    s_factors = s_scales + scales.nbytes
    warp.shared.view(np.uint8)[s_scales:s_factors] = scales.reshape(-1).view(np.uint8)
    values = prefill_image._values(prefill_image._load_row(prefill_image._lane_bytes(warp.lane, dtype), dtype), dtype)
    warp.ways = 8  # factors are read by whole groups, and written once a unit
    prefill_image._widen_scales(s_scales, s_factors, warp.lane)
    rotated = prefill_image._rotated(values, s_factors + prefill_image._factor_bytes(warp.lane), warp.lane)
    warp.ways = 1
    found = image_of_unit(warp, rotated, ROWS)
    exact = rows.double().numpy() * scales.astype(np.float64).repeat(8, axis=0)
    truth = image_of(hadamard(exact).astype(np.float16))
    np.testing.assert_allclose(found.astype(np.float64), truth.astype(np.float64), rtol=2**-10, atol=2e-6)


def test_rows_as_they_are_keep_their_bits(warp: NumpyThreads) -> None:
    rows = np.random.default_rng(1).standard_normal((ROWS, CHANNELS)).astype(np.float16)
    place_rows(warp, torch.from_numpy(rows), "float16")
    words = prefill_image._load_row(prefill_image._lane_bytes(warp.lane, "float16"), "float16")
    found = image_of_unit(warp, prefill_image._values(words, "float16"), ROWS)
    np.testing.assert_array_equal(found.view(np.uint16), image_of(rows).view(np.uint16))


@pytest.mark.parametrize("rows", [8, 12])
def test_rows_past_the_window_are_not_written(warp: NumpyThreads, rows: int) -> None:
    found = image_of_unit(warp, [np.ones(32, np.float32)] * (CHANNELS // 2), rows)
    assert np.all(found[:, :rows] == 1.0)
    assert np.all(found[:, rows:].copy().view(np.uint8) == 0xA5)


@pytest.mark.parametrize("width", [96, 128, 136, 640])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_cover_a_unit_and_zeros_lie_past_the_width(monkeypatch, dtype: str, width: int) -> None:
    size, lane = {"float16": 2, "bfloat16": 2, "float32": 4}[dtype], np.arange(32)
    source = np.tile(np.random.default_rng(5).permutation(50)[:ROWS], 2)
    pitch, channel = 1024, 128
    copies: list[tuple[np.ndarray, ...]] = []
    monkeypatch.setattr(prefill_image.wgmma, "copy_or_zero", lambda *copy: copies.append(copy))
    monkeypatch.setattr(prefill_image.cute.arch, "shuffle_sync", lambda value, place: value[place])
    for name, convert in (("Int64", np.int64), ("Int32", np.int64)):
        monkeypatch.setattr(prefill_image, name, convert)
    prefill_image._copy_rows(0, 0, source, pitch, channel, width, lane, dtype)
    targets = np.concatenate([copy[0] for copy in copies])
    row, inside = np.divmod(targets, prefill_image.row_pitch(dtype))
    covered = np.sort(row * (CHANNELS * size) + inside)
    np.testing.assert_array_equal(covered, np.arange(0, ROWS * CHANNELS * size, 16))
    nbytes = np.concatenate([np.broadcast_to(copy[2], 32) for copy in copies])
    live = channel + inside // size < width
    np.testing.assert_array_equal(nbytes, np.where(live, 16, 0))
    address = np.concatenate([copy[1] for copy in copies])
    np.testing.assert_array_equal(address[live], (source[row] * pitch + channel)[live] * size + inside[live])


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_binary_has_no_stack(images: int, dtype: str) -> None:
    report = report_kernel(PrefillImageKey("sm_90a", dtype, images))
    assert report.error is None
    assert report.is_good, report
