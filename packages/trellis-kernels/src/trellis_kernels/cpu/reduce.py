"""Owns the torch reduction of routes to tokens, ordered by slot.  It must not know experts."""

from __future__ import annotations

import torch

from trellis_kernels.arguments import check_reduce_routes

__all__ = ["reduce_routes"]


def reduce_routes(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    factor: float = 1.0,
    accumulator: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Sum each token's weighted routes; see `trellis_kernels.ops.reduce_routes`."""
    check_reduce_routes(rows, topk_weights, accumulator, out)
    tokens, top_k = topk_weights.shape
    channels = out.shape[1]
    by_slot = rows.view(tokens, top_k, rows.shape[1])[:, :, :channels]
    weights = topk_weights.float() * factor
    total = torch.zeros(tokens, channels, dtype=torch.float32, device=rows.device)
    if accumulator is not None:
        total = accumulator[:tokens, :channels].zero_()
    for slot in range(top_k):
        term = by_slot[:, slot] * weights[:, slot, None]
        total += term if accumulator is None else term.to(out.dtype)
    return out.copy_(total)
