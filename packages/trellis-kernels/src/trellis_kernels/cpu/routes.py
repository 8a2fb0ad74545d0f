"""Owns the torch packing of routes: stable, in O(routes log routes).  It must not know weights."""

from __future__ import annotations

import torch

from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.routes import PackedRoutes, route_capacity

__all__ = ["pack_routes"]


def pack_routes(
    topk_ids: torch.Tensor, *, num_experts: int, block_rows: int, expert_map: torch.Tensor | None = None
) -> PackedRoutes:
    """Order routes by expert; see `trellis_kernels.ops.pack_routes`."""
    check_dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check_shape("topk_ids", topk_ids, None, None)
    routes = topk_ids.numel()
    slots = route_capacity(routes, num_experts, block_rows)
    device = topk_ids.device
    experts = _local_experts(topk_ids.reshape(-1).long(), num_experts, expert_map)
    order = torch.argsort(experts, stable=True)  # dropped routes sort last
    counts = torch.bincount(experts, minlength=num_experts + 1)[:num_experts]
    padded = (counts + block_rows - 1) // block_rows * block_rows
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    offsets[1:] = padded.cumsum(0)
    first_route = counts.cumsum(0) - counts
    live = order[: int(counts.sum())]
    owner = experts[live]
    place = offsets[owner] + torch.arange(live.numel(), device=device) - first_route[owner]
    route_indices = torch.full((slots,), routes, dtype=torch.int32, device=device)
    route_indices[place] = live.to(torch.int32)
    blocks = -(-slots // block_rows)
    block_experts = torch.full((blocks,), -1, dtype=torch.int32, device=device)
    used = torch.repeat_interleave(torch.arange(num_experts, device=device), padded // block_rows)
    block_experts[: used.numel()] = used.to(torch.int32)
    return PackedRoutes(
        block_rows,
        route_indices,
        block_experts,
        offsets[-1:].to(torch.int32),
        offsets.to(torch.int32),
        counts.to(torch.int32),
    )


def _local_experts(ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert of each route; `num_experts` for a dropped one."""
    if expert_map is not None:
        check_dtype("expert_map", expert_map, torch.int32)
        check_shape("expert_map", expert_map, None)
        check_device(ids.device, expert_map=expert_map)
        known = (ids >= 0) & (ids < expert_map.numel())
        mapped = torch.full_like(ids, -1)
        mapped[known] = expert_map[ids[known]].long()
        ids = mapped
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
