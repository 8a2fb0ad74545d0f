"""Owns the scratch of a launch: its buffers by name, dtype and size, and their places in an arena.

It must not allocate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trellis_kernels.layers import MoeSmallKey, PrefillPlan, scratch_nbytes
from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.specs import ExecutionCapacity

if TYPE_CHECKING:
    from trellis_moe.plan import WeightPlan

__all__ = [
    "ALIGNMENT",
    "FUSED_ALIGNMENT",
    "FUSED_BUFFER",
    "ScratchBuffer",
    "carve",
    "fused_scratch",
    "op_by_op_scratch",
    "total_bytes",
]

ALIGNMENT = 16
"""Boundary of every buffer, in bytes."""
FUSED_ALIGNMENT = 256
"""Boundary of the scratch of the fused kernels, in bytes; found inside its buffer, which is that much larger."""
FUSED_BUFFER = "fused"
"""Name of that buffer."""
_DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class ScratchBuffer:
    """One buffer: its name, a dtype name, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def op_by_op_scratch(weights: WeightPlan, capacity: ExecutionCapacity) -> tuple[ScratchBuffer, ...]:
    """Buffers of the path that runs one op after the other, for its largest launch.

    The rotated input of gate and up is one buffer used twice; the rotated activation overlays nothing, so that each
    buffer can be read after a launch.  Route weights are held once more because those of dropped routes must be zero:
    a caller may pass anything there, and NaN times a row of zeros is NaN.
    """
    routes = capacity.routes
    hidden, width = weights.source.geometry.padded_hidden_size, weights.extent.width
    gate = (ScratchBuffer("gate", "float32", (routes, width)),) if weights.source.geometry.gated else ()
    return (
        ScratchBuffer("experts", "int64", (routes,)),
        ScratchBuffer("tokens", "int64", (routes,)),
        ScratchBuffer("route_weights", "float32", (routes,)),
        ScratchBuffer("rotated_input", "float16", (routes, hidden)),
        *gate,
        ScratchBuffer("up", "float32", (routes, width)),
        ScratchBuffer("rotated_activation", "float16", (routes, width)),
        ScratchBuffer("route_output", "float32", (routes, hidden)),
    )


def fused_scratch(fused: MoeSmallKey | PrefillPlan, capacity: ExecutionCapacity) -> tuple[ScratchBuffer, ...]:
    """The one buffer of a fused path, for its largest launch; the kernels' own parts lie inside it."""
    size = scratch_nbytes(fused, capacity.max_tokens) if isinstance(fused, MoeSmallKey) else fused.scratch_nbytes
    return (ScratchBuffer(FUSED_BUFFER, "uint8", (size + FUSED_ALIGNMENT - ALIGNMENT,)),)


def total_bytes(buffers: Iterable[ScratchBuffer]) -> int:
    """Bytes of an arena that holds every buffer on its boundary."""
    return sum(_aligned(buffer.nbytes) for buffer in buffers)


def carve(arena: torch.Tensor, buffers: Iterable[ScratchBuffer]) -> dict[str, torch.Tensor]:
    """Views of an arena, one per buffer, in order.

    Args:
        arena: `[bytes] uint8`, contiguous, on a 16-byte boundary.
        buffers: what to place.

    Raises:
        MoeTypeError: if the arena is not a uint8 tensor.
        MoeValueError: if it is not one contiguous axis, is misaligned, or is too small; names both numbers.
    """
    buffers = tuple(buffers)
    needed = total_bytes(buffers)
    if not isinstance(arena, torch.Tensor) or arena.dtype != torch.uint8:
        got = arena.dtype if isinstance(arena, torch.Tensor) else type(arena).__name__
        raise MoeTypeError(f"scratch must be a tensor of torch.uint8, got {got}")
    if arena.ndim != 1 or not arena.is_contiguous():
        raise MoeValueError(
            f"scratch must be one contiguous axis of bytes, got shape {list(arena.shape)}, strides {arena.stride()}"
        )
    if arena.data_ptr() % ALIGNMENT:
        raise MoeValueError(
            f"scratch begins {arena.data_ptr() % ALIGNMENT} bytes past a boundary of {ALIGNMENT}; it must begin on one"
        )
    if arena.numel() < needed:
        raise MoeValueError(f"scratch has {arena.numel()} bytes, the plan needs {needed}")
    views, first = {}, 0
    for buffer in buffers:
        part = arena[first : first + buffer.nbytes]
        views[buffer.name] = part.view(_DTYPES[buffer.dtype]).view(buffer.shape)
        first += _aligned(buffer.nbytes)
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
