"""Holds the powers of two of operands to being exact, and to what float16 then keeps."""

from __future__ import annotations

import pytest
import torch

from moe.samples import bits
from trellis_moe.paths.operands import LARGEST, fit_rows, unscale_rows


def fit(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scaled rows, the powers, and the operand."""
    scaled, powers = rows.clone(), torch.full(rows.shape[:1], float("nan"))
    out = torch.full(rows.shape, float("nan"), dtype=torch.float16)
    fit_rows(scaled, powers, out)
    return scaled, powers, out


@pytest.mark.parametrize("power", [-100, -60, -14, -1, 0, 1, 9, 16, 60, 110])
def test_rows_come_into_range_and_back_without_a_bit_lost(power: int) -> None:
    rows = torch.randn(33, 128, generator=torch.Generator().manual_seed(1)) * 2.0**power
    rows[rows.abs() < 2.0 ** (power - 6)] = 2.0**power  # nothing that float32 itself would round on the way
    scaled, powers, out = fit(rows)
    largest = scaled.abs().amax(1)
    assert ((largest >= 2.0 ** (LARGEST - 1)) & (largest < 2.0**LARGEST)).all()
    assert torch.equal(torch.frexp(powers).mantissa, torch.full((33,), 0.5))
    unscale_rows(scaled, powers)
    assert bits(scaled) == bits(rows)
    assert ((out.float() * powers[:, None] - rows).abs() <= rows.abs() * 2.0**-11).all()


def test_values_far_below_a_rows_largest_keep_full_precision() -> None:
    rows = torch.tensor([[1.0, 2.0**-21 * 1.2345, 0.0, -(2.0**-20) * 1.9]])
    _, powers, out = fit(rows)
    found = out.float() * powers[:, None]
    assert ((found - rows).abs() <= rows.abs() * 2.0**-11).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_rows_without_a_size_are_left_as_they_are(value: float) -> None:
    rows = torch.zeros(3, 8)
    rows[1, 2] = value
    rows[2] = 7.0
    scaled, powers, out = fit(rows)
    assert torch.equal(powers[:2], torch.ones(2))
    assert bits(scaled[:2]) == bits(rows[:2])
    assert bits(out[:2]) == bits(rows[:2].half())
    assert out[2, 0] == 448.0


@pytest.mark.parametrize("value", [1e-45, 1e-38, 3e38])
def test_the_ends_of_float32_have_powers_that_are_normal(value: float) -> None:
    rows = torch.full((1, 4), value)
    scaled, powers, out = fit(rows)
    assert torch.isfinite(out).all()
    assert 2.0**-126 <= powers.item() <= 2.0**126
    unscale_rows(scaled, powers)
    assert bits(scaled) == bits(rows)
