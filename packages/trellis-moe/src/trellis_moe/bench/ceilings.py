"""Owns the measurement of what a device does at the most: copying, multiplying, decoding.  It must not know layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trellis_format.codebooks import get_codebook
from trellis_format.rates import Rate
from trellis_kernels.bench.ops import ceiling_rows, copy_row
from trellis_kernels.bench.timing import Samples, eager_samples, graph_samples
from trellis_kernels.cute.keys import KernelKey
from trellis_moe.bench.record import COPY, GEMM, Recorder, decode_ceiling

__all__ = ["ceiling_keys", "measure_copy", "measure_decode", "measure_gemm"]

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
_GEMM_SIDE = {"cuda": 8192, "cpu": 128}


def measure_copy(recorder: Recorder) -> None:
    """Record the device copy."""
    row = copy_row(recorder.device, nbytes=_COPY_BYTES[recorder.device.type], count=recorder.samples)
    if row.error != 0.0:
        raise RuntimeError(f"the copy is off by {row.error}")
    recorder.add_ceiling(COPY, "bytes", row.moved_bytes, row.samples)


def measure_gemm(recorder: Recorder) -> None:
    """Record a dense bf16 product, over pairs of matrices that take turns."""
    side = _GEMM_SIDE[recorder.device.type]
    pairs = [
        tuple(torch.randn(side, side, device=recorder.device).bfloat16() for _ in range(2))
        for _ in range(3)
    ]  # fmt: skip
    out = torch.full((side, side), torch.nan, device=recorder.device).bfloat16()
    launches = [lambda a=a, b=b: torch.mm(a, b, out=out) for a, b in pairs]
    samples: Samples = (
        graph_samples(launches, count=recorder.samples, least=3)
        if recorder.device.type == "cuda"
        else eager_samples(launches, device=recorder.device, count=recorder.samples)
    )
    a, b = pairs[-1]
    wanted = a[:4].double() @ b.double()
    error = float((out[:4].double() - wanted).norm() / wanted.norm())
    if not error <= 8e-3:  # rounding to bf16 alone is 2e-3
        raise RuntimeError(f"the product is off by {error:.1e}")
    recorder.add_ceiling(GEMM, "flops", 2 * side**3, samples)


def measure_decode(recorder: Recorder, codebook: str, k: str) -> None:
    """Record the rate at which weights are decoded from registers; needs a GPU."""
    rows = list(
        ceiling_rows(recorder.device, codebooks=[codebook], rates=[k], sources=(False,), count=recorder.samples)
    )
    for row in rows:
        recorder.add_ceiling(decode_ceiling(codebook, k), "weights", row.weights, row.samples)


def ceiling_keys(pairs: Iterable[tuple[str, str]], arch: str) -> Sequence[KernelKey]:
    """The kernels that measure decoding.

    Args:
        pairs: (codebook, K) of each; those that are not legal are left out.
        arch: compile target.
    """
    from trellis_kernels.cute.ceiling import CeilingKey  # needs the DSL

    legal = [(name, Rate.of(k)) for name, k in pairs if Rate.of(k) in get_codebook(name).legal_rates]
    return [CeilingKey(arch, name, rate.half_bits, False) for name, rate in legal]
