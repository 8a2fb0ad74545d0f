"""Holds the shared argument checks to what they accept, and to messages with both the observed and the legal."""

from __future__ import annotations

import pytest
import torch

from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.errors import KernelTypeError, KernelValueError

TENSOR = torch.zeros(2, 3)


def test_dtype_is_one_of_the_given() -> None:
    check_dtype("x", TENSOR, torch.float16, torch.float32)
    with pytest.raises(KernelTypeError, match=r"x must be torch.float16 or torch.int16, got torch.float32"):
        check_dtype("x", TENSOR, torch.float16, torch.int16)


@pytest.mark.parametrize("value", [None, 3, [1.0], TENSOR.numpy()])
def test_only_tensors_have_a_dtype(value: object) -> None:
    with pytest.raises(KernelTypeError, match=f"must be a tensor, got {type(value).__name__}"):
        check_dtype("x", value, torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 3), (None, 3), (2, None), (None, None)])
def test_shape_fits(shape: tuple[int | None, ...]) -> None:
    check_shape("x", TENSOR, *shape)


@pytest.mark.parametrize(
    ("shape", "text"), [((2, 4), r"\[2, 4\]"), ((None, 2), r"\[\*, 2\]"), ((2,), r"\[2\]"), ((2, 3, 1), r"\[2, 3, 1\]")]
)
def test_shape_does_not_fit(shape: tuple[int | None, ...], text: str) -> None:
    with pytest.raises(KernelValueError, match=rf"x must be {text}, got \[2, 3\]"):
        check_shape("x", TENSOR, *shape)


def test_devices_agree() -> None:
    check_device(torch.device("cpu"), x=TENSOR, y=None)
    with pytest.raises(KernelTypeError, match="y must be on cpu, got meta"):
        check_device(torch.device("cpu"), x=TENSOR, y=TENSOR.to("meta"))
