"""Owns what launches of the ops around the GEMM share: dtype names, and checks of what only a kernel needs.

It must not know any kernel.
"""

from __future__ import annotations

import torch

from trellis_kernels.errors import KernelTypeError, KernelValueError

__all__ = ["DTYPE_NAMES", "MAX_ELEMENTS", "check_cuda", "check_flat", "check_rows", "index_bytes", "is_wide"]

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Name of each io dtype in compile keys."""

MAX_ELEMENTS = 2**31 - 4096
"""Elements that launches count in an int32, with room for the last block of a grid."""

_ALIGNMENT = 16
_CHUNK = 8


def is_wide(x: torch.Tensor) -> bool:
    """Whether lanes can read rows of x in chunks of eight channels, 16-byte aligned."""
    pitch = x.stride(0) * x.element_size()
    return x.shape[1] % _CHUNK == 0 and x.data_ptr() % _ALIGNMENT == 0 and pitch % _ALIGNMENT == 0


def check_rows(*, aligned: bool, contiguous: bool = False, **matrices: torch.Tensor | None) -> None:
    """Accept matrices whose rows are contiguous; None is no matrix.

    Args:
        aligned: whether each row must also start at a multiple of 16 bytes.
        contiguous: whether rows must also follow each other without a gap.
        matrices: by the name that a message gives them.

    Raises:
        KernelValueError: if one is not so; names its strides or its distance from a multiple of 16 bytes.
    """
    for name, matrix in matrices.items():
        if matrix is None or not matrix.numel():
            continue
        if matrix.stride(1) != 1 and matrix.shape[1] > 1:
            raise KernelValueError(f"{name} must have contiguous rows, got strides {matrix.stride()}")
        if contiguous and not matrix.is_contiguous():
            raise KernelValueError(f"{name} must be contiguous, got strides {matrix.stride()}")
        pitch = matrix.stride(0) * matrix.element_size() if matrix.shape[0] > 1 else 0
        past = max(matrix.data_ptr() % _ALIGNMENT, pitch % _ALIGNMENT)
        if aligned and past:
            raise KernelValueError(
                f"rows of {name} must start at multiples of {_ALIGNMENT} bytes, got one {past} bytes past"
            )


def index_bytes(name: str, indices: torch.Tensor | None) -> tuple[int, int]:
    """Address and bytes of an element of an index vector, 0 and 0 for None.

    Raises:
        KernelValueError: if it is not contiguous.
    """
    if indices is None:
        return 0, 0
    if not indices.is_contiguous():
        raise KernelValueError(f"{name} must be contiguous, got strides {indices.stride()}")
    return indices.data_ptr(), indices.element_size()


def check_cuda(name: str, tensor: torch.Tensor) -> None:
    """Accept a tensor on a CUDA device.

    Raises:
        KernelTypeError: if it is elsewhere; names where.
    """
    if tensor.device.type != "cuda":
        raise KernelTypeError(f"{name} must be on a CUDA device, got {tensor.device}")


def check_flat(**tensors: torch.Tensor | None) -> None:
    """Accept contiguous tensors that start at a multiple of 16 bytes and whose elements an int32 counts.

    Raises:
        KernelValueError: if one is not so; names its strides, its distance from such a multiple, or its size.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise KernelValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        past = tensor.data_ptr() % _ALIGNMENT
        if past:
            raise KernelValueError(f"{name} must start at a multiple of {_ALIGNMENT} bytes, got {past} bytes past one")
        if tensor.numel() > MAX_ELEMENTS:
            raise KernelValueError(f"{name} must have at most {MAX_ELEMENTS} elements, got {tensor.numel()}")
