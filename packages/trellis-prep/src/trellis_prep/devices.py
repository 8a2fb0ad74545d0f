"""Owns the choice of a destination and the memory of prepared tensors there.  It must not know how bytes arrive."""

from __future__ import annotations

from typing import Protocol

import torch

from trellis_prep.errors import PrepMemoryError, PrepStateError, PrepTypeError, PrepValueError
from trellis_prep.layout import TensorSpec

__all__ = ["TensorLayout", "allocate", "resolve_device"]


class TensorLayout(Protocol):
    """Tensors to be prepared, such as `PreparedLayout`."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The destination that an argument names.

    Args:
        device: "cpu" (None is the same), "cuda" for the current CUDA device, "cuda:N", or a `torch.device`.

    Raises:
        PrepTypeError: if it is neither a string nor a `torch.device`.
        PrepValueError: if it is not a CPU or CUDA device, or is not there.
        PrepStateError: if a CUDA graph is being captured, which preparation must not be part of.
    """
    if device is not None and not isinstance(device, str | torch.device):
        raise PrepTypeError(f"device must be a string or torch.device, got {type(device).__name__}")
    try:
        target = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise PrepValueError(f"{device!r} is not a device; give cpu, cuda or cuda:N") from error
    if target.type == "cpu":
        if target.index:
            raise PrepValueError(f"device {target} is not there: cpu is one device")
        return torch.device("cpu")
    if target.type != "cuda":
        raise PrepValueError(f"device must be cpu or cuda, got {target.type}")
    count = torch.cuda.device_count()
    if (target.index or 0) >= count:
        raise PrepValueError(f"device {target} is not there: {count} CUDA devices are visible")
    if torch.cuda.is_current_stream_capturing():
        raise PrepStateError("weights cannot be prepared while a CUDA graph is captured; prepare before the capture")
    return target if target.index is not None else torch.device("cuda", torch.cuda.current_device())


def allocate(layout: TensorLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for every prepared tensor, not yet written.

    Args:
        layout: names, shapes and dtypes.
        device: where.

    Raises:
        PrepMemoryError: if memory runs out; names the tensor, its bytes and the device, and nothing stays allocated.
    """
    tensors: dict[str, torch.Tensor] = {}
    for spec in layout.tensors:
        try:
            tensors[spec.name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError, as is a CPU's failure
            tensors.clear()
            raise PrepMemoryError(
                f"{spec.name} of {spec.nbytes} bytes cannot be had on {device}, of {layout.total_bytes} bytes in all: "
                f"{str(error).splitlines()[0]}"
            ) from error
    return tensors
