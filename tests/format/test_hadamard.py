"""Holds the rotation to its definition, an explicit matrix product in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.hadamard import HADAMARD_BLOCK, hadamard

BLOCKS = (1, 2, 4, 32, 128, 512)


def matrix(block: int) -> np.ndarray:
    index = np.arange(block)
    signs = np.vectorize(lambda both: -1.0 if int(both).bit_count() % 2 else 1.0)(index[:, None] & index)
    return signs / math.sqrt(block)


def test_the_block_of_exl3_is_128() -> None:
    assert HADAMARD_BLOCK == 128


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_each_block_is_multiplied_by_the_matrix(block: int, blocks: int) -> None:
    values = np.random.default_rng(block).normal(size=(3, 2, blocks * block))
    expected = (values.reshape(3, 2, blocks, block) @ matrix(block)).reshape(values.shape)
    result = hadamard(values, block)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)


@given(st.integers(0, 2**32), st.sampled_from(BLOCKS))
def test_the_rotation_is_its_own_inverse_and_keeps_lengths(seed: int, block: int) -> None:
    values = np.random.default_rng(seed).normal(size=(2, 2 * block))
    once = hadamard(values, block)
    np.testing.assert_allclose(hadamard(once, block), values, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(once), np.linalg.norm(values), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float16, 4e-3), (np.float32, 1e-6), (np.float64, 1e-15)])
def test_the_precision_of_the_input_is_kept(dtype: type, bound: float) -> None:
    values = np.random.default_rng(0).normal(size=(5, 256)).astype(dtype)
    result = hadamard(values)
    exact = hadamard(values.astype(np.float64))
    assert result.dtype == dtype
    assert np.linalg.norm(result - exact) / np.linalg.norm(exact) <= bound


def test_a_unit_channel_spreads_over_its_own_block_alone() -> None:
    values = np.zeros(384)
    values[130] = 1.0
    result = hadamard(values)
    assert np.count_nonzero(result[:128]) == np.count_nonzero(result[256:]) == 0
    np.testing.assert_allclose(result[128:256], matrix(128)[2], atol=1e-15)


def test_strided_input_is_left_alone() -> None:
    values = np.random.default_rng(0).normal(size=(256, 4))
    before = values.copy()
    np.testing.assert_allclose(hadamard(values.T), hadamard(np.ascontiguousarray(values.T)))
    assert np.array_equal(values, before)


def test_no_rows_give_no_rows() -> None:
    assert hadamard(np.zeros((0, 256))).shape == (0, 256)


@pytest.mark.parametrize("block", [0, -128, 3, 96])
def test_a_block_is_a_power_of_two(block: int) -> None:
    with pytest.raises(FormatValueError, match=f"Hadamard block {block} is not a power of two"):
        hadamard(np.zeros(192), block)


@pytest.mark.parametrize(("channels", "nearest"), [(100, "128"), (200, "128 or 256"), (320, "256 or 384")])
def test_a_block_divides_the_axis(channels: int, nearest: str) -> None:
    with pytest.raises(FormatValueError, match=f"{channels} channels .* block 128; nearest: {nearest}$"):
        hadamard(np.zeros((2, channels)))


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.bool_, np.complex128])
def test_values_are_real_and_floating(dtype: type) -> None:
    with pytest.raises(FormatTypeError, match="floating values"):
        hadamard(np.zeros(128, dtype))
