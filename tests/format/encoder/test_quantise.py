"""Holds the quantisation of a matrix to its error in the original basis, to padding, and to what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from trellis_format.encoder.quantise import quantise
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import Rate
from trellis_format.reference import reconstruct


def matrix(k: int = 128, n: int = 128, seed: int = 0) -> np.ndarray:
    """Normal values whose channels differ in size by up to a factor of 64, as those of models do."""
    rng = np.random.default_rng(seed)
    rows, columns = np.exp2(rng.uniform(-3, 3, (k, 1))), np.exp2(rng.uniform(-3, 3, (1, n)))
    return rng.normal(size=(k, n)) * rows * columns * 0.02


def restored(weight: np.ndarray, bits: float, codebook: str) -> np.ndarray:
    rate = Rate.of(bits)
    made = quantise(weight, rate, codebook, seed=5)
    assert made.trellis.shape == (weight.shape[0] // 16, weight.shape[1] // 16, rate.tile_words16)
    assert (made.trellis.dtype, made.suh.dtype, made.svh.dtype) == (np.int16, np.float16, np.float16)
    return reconstruct(made.trellis, made.suh, made.svh, codebook, rate)


@pytest.mark.parametrize(("bits", "codebook"), [(3, "mcg"), (5, "3inst"), (8, "mul1")])
def test_relative_error_follows_the_rate(bits: float, codebook: str) -> None:
    weight = matrix()
    error = np.sum((restored(weight, bits, codebook) - weight) ** 2) / np.sum(weight**2)
    assert 0.5 * 2.0 ** (-2 * bits) < error < 2.0 * 2.0 ** (-2 * bits)


def test_channels_of_zeros_stay_zero() -> None:
    weight = matrix(128, 256)
    weight[:, 200:], weight[100:] = 0.0, 0.0
    found = restored(weight, 6, "mul1")
    assert not found[:, 200:].any()
    assert not found[100:].any()
    error = np.sum((found - weight) ** 2) / np.sum(weight**2)
    assert error < 4.0 * 2.0**-12


def test_a_matrix_of_zeros_is_restored() -> None:
    assert not restored(np.zeros((128, 128), dtype=np.float32), 8, "mul1").any()


def test_the_seed_alone_is_random() -> None:
    weight = np.zeros((128, 128))
    weight[:, 5] = 1.0
    first, again, other = (quantise(weight, Rate.of(8), "mcg", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.trellis, again.trellis)
    assert np.array_equal(first.suh, again.suh)
    assert np.array_equal(first.suh != other.suh, first.suh == -other.suh)
    assert not np.array_equal(first.suh, other.suh)


def test_integers_are_refused() -> None:
    with pytest.raises(FormatTypeError, match="must be floating, got int32"):
        quantise(np.zeros((128, 128), dtype=np.int32), Rate.of(3), "mcg")


@pytest.mark.parametrize(
    ("shape", "near"),
    [((120, 128), "128 x 128"), ((128, 129), "128 x 256"), ((0, 128), "128 x 128"), ((128,), "128")],
)
def test_sides_are_multiples_of_128(shape: tuple[int, ...], near: str) -> None:
    with pytest.raises(FormatValueError, match=f"multiples of 128; nearest: {near}"):
        quantise(np.zeros(shape), Rate.of(3), "mcg")


def test_values_that_are_not_finite_are_named() -> None:
    weight = matrix()
    weight[3, 4] = np.nan
    with pytest.raises(FormatValueError, match=r"it has nan at \[3, 4\]"):
        quantise(weight, Rate.of(3), "mcg")


@pytest.mark.parametrize("factor", [1e12, 1e-12, 1e300])
def test_scales_that_float16_does_not_hold_are_refused(factor: float) -> None:
    with pytest.raises(FormatValueError, match=r"input channel \d+ needs a scale of .*, which float16 does not hold"):
        quantise(matrix() * factor, Rate.of(8), "mcg")


def test_rates_that_the_codebook_lacks_are_refused() -> None:
    with pytest.raises(FormatValueError, match="no half rate"):
        quantise(matrix(), Rate.of(1.5), "3inst")
