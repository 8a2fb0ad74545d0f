"""Owns the torch grouped GEMM over trellis codes.  It must not know routing beyond packed routes.

A row's bits must not depend on how many other rows its expert has, and a matrix product may add in any order.  So the
sums are exact: weights are below 4 and multiples of 2^-18, and each activation is split at 2^-4, so that each part's
terms are integers of one unit whose sum float64 holds for up to 8,192 channels, whatever the order.
"""

from __future__ import annotations

import torch

from trellis_kernels.bank import CodeBank
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.ops import backend_for, implementation
from trellis_kernels.routes import PackedRoutes

__all__ = ["grouped_gemm", "split_exactly"]


def grouped_gemm(a: torch.Tensor, bank: CodeBank, routes: PackedRoutes, *, out: torch.Tensor) -> torch.Tensor:
    """out[r] = a[r] @ W[expert of r]; see `trellis_kernels.ops.grouped_gemm`."""
    check_dtype("a", a, torch.float16)
    check_dtype("out", out, torch.float32)
    check_shape("a", a, None, bank.k)
    check_shape("out", out, a.shape[0], bank.n)
    check_device(a.device, out=out, words=bank.words, route_indices=routes.route_indices)
    check_shape("expert_counts", routes.expert_counts, bank.num_experts)
    decode = implementation("decode", backend_for("decode", a.device))
    out.zero_()
    counts, offsets = routes.expert_counts.tolist(), routes.expert_offsets.tolist()
    matrix = torch.empty(bank.k, bank.n, dtype=torch.float16, device=a.device)
    for expert, count in enumerate(counts):
        if not count:
            continue
        codes, rate = bank.tiles(expert)
        weight = decode(codes, codebook=bank.codebook, rate=rate, out=matrix).double()
        rows = routes.route_indices[offsets[expert] : offsets[expert] + count].long()
        coarse, fine = split_exactly(a[rows].double())
        out[rows] = (coarse @ weight + fine @ weight).float()
    return out


def split_exactly(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts that add up to `a`: multiples of 2^-4, and what is left, multiples of 2^-24 up to 2^-5.

    Args:
        a: float64 of float16 values, any shape.
    """
    coarse = (a * 16.0).round() / 16.0
    return coarse, torch.where(coarse.isfinite(), a - coarse, 0.0)
