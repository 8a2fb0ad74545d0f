"""Owns the scratch of a launch: its buffers by name, dtype and size, and their places in an arena.

It must not allocate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trellis_kernels.layers import MoeSmallKey, PrefillPlan, launch_scratch
from trellis_moe.errors import MoeTypeError, MoeValueError

if TYPE_CHECKING:
    from trellis_moe.plan import WeightPlan

__all__ = [
    "ALIGNMENT",
    "BOUNDARY_BYTES",
    "FUSED_ALIGNMENT",
    "ScratchBuffer",
    "ScratchSpec",
    "align_fused",
    "carve",
    "check_arena",
    "fused_scratch",
    "op_by_op_scratch",
    "place",
    "total_bytes",
]

ALIGNMENT = 16
"""Boundary of the arena, and of every buffer of the path that runs one op after the other, in bytes."""
FUSED_ALIGNMENT = 256
"""Boundary of the scratch of the fused kernels, in bytes; found inside the arena, which is that much larger."""
BOUNDARY_BYTES = FUSED_ALIGNMENT - ALIGNMENT
"""Bytes that may lie before that boundary."""
_DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
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


@dataclass(frozen=True)
class ScratchSpec:
    """One buffer of one launch, in the arena.

    Attributes:
        launch_tokens: which launch, by its most tokens; launches overlay each other, because a run takes one at a time.
        first: first byte, counted from the arena's start, for a fused path from the boundary inside it.
        buffer: name, dtype and shape.
    """

    launch_tokens: int
    first: int
    buffer: ScratchBuffer


def op_by_op_scratch(weights: WeightPlan, tokens: int, top_k: int) -> tuple[ScratchBuffer, ...]:
    """Buffers of the path that runs one op after the other, for up to that many tokens.

    The rotated input of gate and up is one buffer used twice; rows on their way to it are float32 in the output's
    buffer, and those on their way to down in up's, each with the power of two that brings it into float16.  Route
    weights are held once more because those of dropped routes must be zero: a caller may pass anything there, and NaN
    times a row of zeros is NaN.
    """
    routes = tokens * top_k
    hidden, width = weights.source.geometry.padded_hidden_size, weights.extent.width
    gate = (ScratchBuffer("gate", "float32", (routes, width)),) if weights.source.geometry.gated else ()
    return (
        ScratchBuffer("experts", "int64", (routes,)),
        ScratchBuffer("tokens", "int64", (routes,)),
        ScratchBuffer("route_weights", "float32", (routes,)),
        ScratchBuffer("powers", "float32", (routes,)),
        ScratchBuffer("rotated_input", "float16", (routes, hidden)),
        *gate,
        ScratchBuffer("up", "float32", (routes, width)),
        ScratchBuffer("rotated_activation", "float16", (routes, width)),
        ScratchBuffer("route_output", "float32", (routes, hidden)),
        *_transform_scratch(weights, tokens, routes),
    )


def _transform_scratch(weights: WeightPlan, tokens: int, routes: int) -> tuple[ScratchBuffer, ...]:
    """What an intermediate Hadamard takes besides: tokens in its basis, and both branches interleaved."""
    if weights.source.expert_transform is None:
        return ()
    hidden, width = weights.source.geometry.padded_hidden_size, weights.extent.width
    return (
        ScratchBuffer("by_token", "float32", (tokens, hidden)),
        ScratchBuffer("interleaved", "float32", (routes, 2 * width)),
    )


def fused_scratch(fused: MoeSmallKey | PrefillPlan, tokens: int) -> tuple[ScratchBuffer, ...]:
    """Buffers of a fused path for up to that many tokens: the kernels' own parts, and the bytes before the boundary."""
    parts = launch_scratch(fused, tokens)
    return (
        *(ScratchBuffer(name, "uint8", (nbytes,)) for name, nbytes in parts.items()),
        ScratchBuffer("boundary", "uint8", (BOUNDARY_BYTES,)),
    )


def align_fused(arena: torch.Tensor) -> torch.Tensor:
    """The arena from the first boundary that the fused kernels ask for."""
    return arena[-arena.data_ptr() % FUSED_ALIGNMENT :]


def total_bytes(buffers: Iterable[ScratchBuffer]) -> int:
    """Bytes of an arena that holds every buffer on its boundary."""
    return sum(_aligned(buffer.nbytes) for buffer in buffers)


def place(launch_tokens: int, buffers: Iterable[ScratchBuffer]) -> tuple[ScratchSpec, ...]:
    """The places of a launch's buffers, one after the other."""
    specs, first = [], 0
    for buffer in buffers:
        specs.append(ScratchSpec(launch_tokens, first, buffer))
        first += _aligned(buffer.nbytes)
    return tuple(specs)


def carve(arena: torch.Tensor, buffers: Iterable[ScratchBuffer]) -> dict[str, torch.Tensor]:
    """Views of an arena, one per buffer, in order.

    Args:
        arena: `[bytes] uint8`, contiguous, on a 16-byte boundary.
        buffers: what to place.

    Raises:
        MoeTypeError, MoeValueError: as `check_arena`.
    """
    buffers = tuple(buffers)
    check_arena(arena, total_bytes(buffers))
    return {
        spec.buffer.name: arena[spec.first : spec.first + spec.buffer.nbytes]
        .view(_DTYPES[spec.buffer.dtype])
        .view(spec.buffer.shape)
        for spec in place(0, buffers)
    }


def check_arena(arena: torch.Tensor, needed: int) -> None:
    """Accept an arena of at least that many bytes.

    Raises:
        MoeTypeError: if it is not a uint8 tensor.
        MoeValueError: if it is not one contiguous axis, is misaligned, or is too small; names both numbers.
    """
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
