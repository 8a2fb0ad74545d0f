"""Owns the torch reduction of routes to tokens, ordered by slot.  It must not know experts."""

from __future__ import annotations

import torch

from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.errors import KernelValueError

__all__ = ["reduce_routes"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def reduce_routes(
    rows: torch.Tensor, topk_weights: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor
) -> torch.Tensor:
    """Sum each token's weighted routes in slot order; see `trellis_kernels.ops.reduce_routes`."""
    check_dtype("rows", rows, torch.float32)
    check_dtype("topk_weights", topk_weights, *_FLOATS)
    check_dtype("out", out, *_FLOATS)
    check_shape("topk_weights", topk_weights, None, None)
    check_device(rows.device, topk_weights=topk_weights, out=out)
    tokens, top_k = topk_weights.shape
    check_shape("rows", rows, tokens * top_k, None)
    check_shape("out", out, tokens, None)
    channels = out.shape[1]
    if channels > rows.shape[1]:
        raise KernelValueError(f"out has {channels} channels, the rows {rows.shape[1]}")
    by_slot = rows.view(tokens, top_k, rows.shape[1])[:, :, :channels]
    weights = topk_weights.float() * factor
    total = torch.zeros(tokens, channels, dtype=torch.float32, device=rows.device)
    for slot in range(top_k):
        total += by_slot[:, slot] * weights[:, slot, None]
    return out.copy_(total)
