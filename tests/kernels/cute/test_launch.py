"""Holds the checks of what only kernels need to strides, alignment and sizes."""

from __future__ import annotations

import pytest
import torch

from trellis_kernels.cute import launch
from trellis_kernels.cute.launch import check_cuda, check_flat, check_rows, index_bytes, is_wide
from trellis_kernels.errors import KernelTypeError, KernelValueError

ROWS = torch.zeros(4, 64)


def off_by(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix that starts some elements past a multiple of 16 bytes."""
    base = torch.zeros(4 * 64 + 16, dtype=dtype)
    start = -base.data_ptr() % 16 // base.element_size() + elements
    return base[start : start + 4 * 64].view(4, 64)


@pytest.mark.parametrize(
    ("matrix", "wide"),
    [
        (off_by(0), True),
        (off_by(1), False),
        (off_by(4), True),
        (off_by(4, torch.float16), False),
        (off_by(8, torch.float16), True),
        (off_by(0)[:, :40], True),
        (off_by(0)[:, :41], False),
        (off_by(0).view(-1)[: 3 * 70].view(3, 70)[:, :64], False),
    ],
)
def test_chunks_need_whole_aligned_rows(matrix: torch.Tensor, wide: bool) -> None:
    assert is_wide(matrix) is wide


def test_rows_may_lie_apart_but_not_inside_out() -> None:
    check_rows(aligned=True, x=off_by(0)[:, :8], y=None, z=ROWS[:0].T)
    check_rows(aligned=False, x=off_by(1))
    with pytest.raises(KernelValueError, match=r"x must have contiguous rows, got strides \(1, 64\)"):
        check_rows(aligned=False, x=ROWS.T)
    with pytest.raises(KernelValueError, match="rows of x must start at multiples of 16 bytes, got one 4 bytes past"):
        check_rows(aligned=True, x=off_by(1))
    with pytest.raises(KernelValueError, match="got one 8 bytes past"):
        check_rows(aligned=True, x=off_by(0).view(-1)[: 3 * 66].view(3, 66))
    with pytest.raises(KernelValueError, match="x must be contiguous"):
        check_rows(aligned=True, contiguous=True, x=off_by(0)[:, :8])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_are_an_address_and_a_width(dtype: torch.dtype) -> None:
    indices = torch.zeros(6, dtype=dtype)
    assert index_bytes("rows", indices) == (indices.data_ptr(), dtype.itemsize)
    assert index_bytes("rows", None) == (0, 0)
    with pytest.raises(KernelValueError, match=r"rows must be contiguous, got strides \(2,\)"):
        index_bytes("rows", indices[::2])


def test_flat_tensors_are_contiguous_aligned_and_countable(monkeypatch: pytest.MonkeyPatch) -> None:
    check_flat(up=off_by(0), gate=None)
    with pytest.raises(KernelValueError, match=r"up must be contiguous, got strides \(64, 1\)"):
        check_flat(up=off_by(0)[:, :8])
    with pytest.raises(KernelValueError, match="up must start at a multiple of 16 bytes, got 8 bytes past one"):
        check_flat(up=off_by(2))
    monkeypatch.setattr(launch, "MAX_ELEMENTS", 255)
    with pytest.raises(KernelValueError, match="up must have at most 255 elements, got 256"):
        check_flat(up=off_by(0))


def test_other_devices_are_named() -> None:
    with pytest.raises(KernelTypeError, match="x must be on a CUDA device, got meta"):
        check_cuda("x", ROWS.to("meta"))
