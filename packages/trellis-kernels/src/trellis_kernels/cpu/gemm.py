"""Owns the torch grouped GEMM over trellis codes.  It must not know routing beyond packed routes.

Products of float16 code values and float16 activations are summed in float64 and rounded once to float32, so that a
row's bits do not depend on how many other rows its expert has.
"""

from __future__ import annotations

import torch

from trellis_kernels.bank import CodeBank
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.ops import backend_for, implementation
from trellis_kernels.routes import PackedRoutes

__all__ = ["grouped_gemm"]


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
        out[rows] = (a[rows].double() @ weight).float()
    return out
