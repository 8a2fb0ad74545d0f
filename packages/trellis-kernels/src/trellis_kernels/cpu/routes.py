"""Owns the torch packing of routes: stable, in O(routes log routes).  It must not know weights."""

from __future__ import annotations

import torch

from trellis_kernels.arguments import check_topk_ids
from trellis_kernels.routes import PackedRoutes, empty_routes

__all__ = ["pack_routes"]


def pack_routes(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_rows: int,
    expert_map: torch.Tensor | None = None,
    stable: bool = True,  # noqa: ARG001  # routes in order are also routes in any order
    out: PackedRoutes | None = None,
) -> PackedRoutes:
    """Order routes by expert; see `trellis_kernels.ops.pack_routes`."""
    check_topk_ids(topk_ids, expert_map)
    routes, device = topk_ids.numel(), topk_ids.device
    packed = empty_routes(routes, num_experts, block_rows, device, out)
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
    packed.route_indices.fill_(routes)[place] = live.to(torch.int32)
    used = torch.repeat_interleave(torch.arange(num_experts, device=device), padded // block_rows)
    packed.block_experts.fill_(-1)[: used.numel()] = used.to(torch.int32)
    packed.packed_count.copy_(offsets[-1:])
    packed.expert_offsets.copy_(offsets)
    packed.expert_counts.copy_(counts)
    return packed


def _local_experts(ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert of each route; `num_experts` for a dropped one."""
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        mapped = torch.full_like(ids, -1)
        mapped[known] = expert_map[ids[known]].long()
        ids = mapped
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
