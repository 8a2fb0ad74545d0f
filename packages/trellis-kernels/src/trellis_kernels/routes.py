"""Owns packed routes: the order in which routes are given to the grouped GEMM.  It must not know how they are packed.

A route is a flat index token * top_k + slot.  Segments ascend by expert and each is padded to whole blocks, so that a
block of rows belongs to one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.errors import KernelValueError

__all__ = ["BLOCK_ROWS", "PackedRoutes", "empty_routes", "route_capacity"]

BLOCK_ROWS = (8, 16, 32, 48, 64, 128, 256)
"""Rows of a route block that kernels are built for."""


@dataclass(frozen=True, eq=False)
class PackedRoutes:
    """Routes in the order of their experts.

    Attributes:
        block_rows: rows of a block.
        route_indices: `[slots] int32`, flat route of each slot; padding holds the number of routes, tokens * top_k.
        block_experts: `[blocks] int32`, expert of each block, -1 for an unused one.
        packed_count: `[1] int32`, slots in use, padding included.
        expert_offsets: `[experts + 1] int32`, first slot of each expert's segment.
        expert_counts: `[experts] int32`, routes of each expert.
    """

    block_rows: int
    route_indices: torch.Tensor
    block_experts: torch.Tensor
    packed_count: torch.Tensor
    expert_offsets: torch.Tensor
    expert_counts: torch.Tensor


def route_capacity(routes: int, num_experts: int, block_rows: int) -> int:
    """Slots that always suffice for that many routes: R + E (b - 1), at most R b where R < E.

    Raises:
        KernelValueError: if a number is negative or `block_rows` is not one of `BLOCK_ROWS`.
    """
    if block_rows not in BLOCK_ROWS:
        raise KernelValueError(f"block_rows {block_rows} is not one of {', '.join(map(str, BLOCK_ROWS))}")
    if routes < 0 or num_experts <= 0:
        raise KernelValueError(f"{routes} routes over {num_experts} experts")
    slots = routes + num_experts * (block_rows - 1)
    return min(slots, routes * block_rows) if routes < num_experts else slots


def empty_routes(
    routes: int, num_experts: int, block_rows: int, device: torch.device, arena: PackedRoutes | None = None
) -> PackedRoutes:
    """Uninitialised packed routes that hold that many routes: a given arena, or else the smallest that suffices.

    Args:
        routes: number of routes.
        num_experts: experts that the rank holds.
        block_rows: rows of a block.
        device: where it is.
        arena: tensors to use, of any capacity that suffices.

    Raises:
        KernelTypeError: if the arena is on another device or not int32.
        KernelValueError: if a number is not legal, or the arena is for other blocks or experts, or too small.
    """
    slots = route_capacity(routes, num_experts, block_rows)
    if arena is None:
        sizes = (slots, -(-slots // block_rows), 1, num_experts + 1, num_experts)
        return PackedRoutes(block_rows, *(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
    if arena.block_rows != block_rows:
        raise KernelValueError(f"the arena has blocks of {arena.block_rows} rows, the packing {block_rows}")
    capacity = arena.route_indices.numel()
    if capacity < slots:
        raise KernelValueError(f"{routes} routes need {slots} slots, the arena has {capacity}")
    shapes = {
        "route_indices": capacity,
        "block_experts": -(-capacity // block_rows),
        "packed_count": 1,
        "expert_offsets": num_experts + 1,
        "expert_counts": num_experts,
    }
    for name, size in shapes.items():
        tensor = getattr(arena, name)
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, size)
        check_device(device, **{name: tensor})
        if not tensor.is_contiguous():
            raise KernelValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    return arena
