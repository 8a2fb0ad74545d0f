"""Owns the powers of two that bring a row into float16's range, so that an operand is as exact as its largest value.

It must not know projections.  A product with a power of two is exact, and a row's power depends on the row alone, so
that a token's bits depend neither on the tokens beside it nor on the size that its values happen to have.
"""

from __future__ import annotations

import torch

__all__ = ["LARGEST", "fit_rows", "unscale_rows"]

LARGEST = 9
"""A row's largest magnitude becomes at least 2^(LARGEST - 1) and less than 2^LARGEST.

Float16 then keeps full precision down to 2^-22 of it, and sums of a few such rows stay far below its upper end.
"""
_BIAS = 127  # of a float32 exponent
_MANTISSA_BITS = 23
_MOST = 126  # so that a power and its inverse are normal


def fit_rows(rows: torch.Tensor, powers: torch.Tensor, out: torch.Tensor) -> None:
    """Scale each row by a power of two, in place, and round it to float16.

    Args:
        rows: `[rows, channels] float32`, scaled in place; a row of zeros, or with a value that is not finite, is left
            as it is.
        powers: `[rows] float32`, written: the powers that take the scaling back.
        out: `[rows, channels] float16`, written.
    """
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1)
    exponents = LARGEST - torch.frexp(largest).exponent
    plain = (largest == 0) | ~torch.isfinite(largest)
    exponents = exponents.masked_fill_(plain, 0).clamp_(-_MOST, _MOST)
    rows.mul_(_power(exponents)[:, None])
    powers.copy_(_power(-exponents))
    out.copy_(rows)


def unscale_rows(rows: torch.Tensor, powers: torch.Tensor) -> None:
    """Take a scaling back from what was multiplied by the scaled rows, in place.

    Args:
        rows: `[rows, channels] float32`.
        powers: `[rows] float32`, from `fit_rows`.
    """
    rows.mul_(powers[:, None])


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of int32 exponents from -126 to 126, made of its bits, so that it is exact on every device."""
    return ((exponents + _BIAS) << _MANTISSA_BITS).view(torch.float32)
