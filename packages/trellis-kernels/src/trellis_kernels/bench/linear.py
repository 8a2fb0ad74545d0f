"""Owns the timing of one linear: `python -m trellis_kernels.bench.linear`.  It must not know checkpoints.

Each row of output is checked against float64 first, and has the time of torch's bfloat16 linear of the same shape
beside it.  Copies take turns, together larger than the L2 where one of them is in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trellis_format.rates import Rate
from trellis_format.reference import reconstruct
from trellis_kernels.bench.timing import Launch, Samples, eager_samples, graph_samples
from trellis_kernels.linear import linear
from trellis_prep import PreparedLinear

__all__ = ["SHAPES", "main", "measure", "random_linear"]

SHAPES = ((2048, 4096), (4096, 2048), (4096, 12288), (2048, 151936))
"""(k, n) of linears of Qwen3-30B-A3B and GLM-4.5-Air outside their experts."""
_TURN_BYTES = 128 << 20  # of bfloat16 weights that take turns, over twice the L2 of an H200
_CHECKED_COLUMNS = 256  # of the output, since float64 is slow


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of JSON for each shape and number of rows."""
    parser = argparse.ArgumentParser(prog="python -m trellis_kernels.bench.linear", description=__doc__)
    parser.add_argument("--shape", nargs="+", type=_shape, default=list(SHAPES), metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 1024])
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--rate", default="4", metavar="K", help="bits of a weight (default 4)")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    for k, n in options.shape:
        for rows in options.rows:
            row = measure(
                k, n, rows, options.codebook, Rate.of(options.rate), device=options.device, count=options.samples
            )
            print(json.dumps(row), flush=True)


def random_linear(k: int, n: int, codebook: str, rate: Rate, *, device: str, seed: int = 0) -> PreparedLinear:
    """A linear of random codes and of about unit gain.

    Args:
        k: input channels.
        n: output channels.
        codebook: its name.
        rate: K.
        device: where.
        seed: of the codes.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (k // 16, n // 16, rate.tile_words16)
    codes = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator)
    scale = torch.full((1, k), k**-0.5, dtype=torch.float16, device=device)
    ones = torch.ones(1, n, dtype=torch.float16, device=device)
    return PreparedLinear(codebook, rate, codes, scale, ones, None)


def measure(k: int, n: int, rows: int, codebook: str, rate: Rate, *, device: str, count: int = 10) -> dict[str, Any]:
    """Check and time one linear.

    Args:
        k: input channels.
        n: output channels.
        rows: of x, in bfloat16.
        codebook: its name.
        rate: K.
        device: where.
        count: samples.

    Returns:
        Shape, medians in microseconds of the trellis linear and of bfloat16, and the error to float64.
    """
    turns = max(_TURN_BYTES // (2 * k * n), 1)
    weights = [random_linear(k, n, codebook, rate, device=device, seed=seed) for seed in range(turns)]
    dense = [torch.randn(n, k, dtype=torch.bfloat16, device=device) for _ in range(turns)]
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    error = _error(linear(x, weights[0], out=out), x, weights[0])
    mine = _samples([partial(linear, x, weight, out=out) for weight in weights], device, count)
    theirs = _samples([partial(functional.linear, x, weight) for weight in dense], device, count)
    return {
        "k": k,
        "n": n,
        "rows": rows,
        "codebook": codebook,
        "rate": str(rate),
        "microseconds": mine.microseconds,
        "bf16_microseconds": theirs.microseconds,
        "error": error,
    }


def _samples(launches: Sequence[Launch], device: str, count: int) -> Samples:
    if torch.device(device).type == "cuda":
        return graph_samples(launches, count=count)
    return eager_samples(launches, device=torch.device(device), count=count, warm_ups=1)


def _error(y: torch.Tensor, x: torch.Tensor, weight: PreparedLinear) -> float:
    """Relative L2 to float64 over the first columns of a few rows."""
    wide = min(weight.n, _CHECKED_COLUMNS)
    codes, suh, svh = (part.cpu().numpy() for part in (weight.codes, weight.input_scale[0], weight.output_scale[0]))
    matrix = reconstruct(codes[:, : wide // 16], suh, svh[:wide], weight.codebook, weight.rate)
    truth = x[:8].double().cpu().numpy() @ matrix
    return float(np.linalg.norm(y[:8, :wide].double().cpu().numpy() - truth) / np.linalg.norm(truth))


def _shape(text: str) -> tuple[int, int]:
    k, _, n = text.partition("x")
    return int(k), int(n)
