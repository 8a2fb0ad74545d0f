"""Owns the argument checks that ops share.  It must not know any op."""

from __future__ import annotations

import torch

from trellis_kernels.errors import KernelTypeError, KernelValueError

__all__ = ["check_device", "check_dtype", "check_shape"]


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Accept a tensor of one of the dtypes.

    Raises:
        KernelTypeError: if it is not a tensor or has another dtype; names both.
    """
    if not isinstance(tensor, torch.Tensor):
        raise KernelTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise KernelTypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Accept a tensor of the shape; None is any length.

    Raises:
        KernelValueError: if it has another shape; names both.
    """
    if tensor.ndim != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=False)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise KernelValueError(f"{name} must be [{wanted}], got {list(tensor.shape)}")


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Accept tensors that are on one device; None is no tensor.

    Raises:
        KernelTypeError: if one is elsewhere; names it and both devices.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise KernelTypeError(f"{name} must be on {device}, got {tensor.device}")
