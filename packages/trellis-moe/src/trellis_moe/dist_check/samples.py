"""Owns the layers of noise that the check shares out, and their routes.  It must not know ranks.

A layer's codes are pieces of one pool of random bits, so that the largest layers cost little memory on a host; each
piece is an array of its own for preparation, and shares are slices of one whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.files.arrays import MemoryArray
from trellis_format.source import TrellisSource, TrellisWeights

__all__ = ["Routes", "noise_weights", "random_routes"]

_POOL_LINEARS = 4  # of the largest size; pieces begin anywhere in three of them
_STEP = 8  # 16-bit words between the starts that pieces may have


@dataclass(frozen=True, eq=False)
class Routes:
    """An input: `x [tokens, hidden]`, `ids [tokens, top_k] int64`, `weights [tokens, top_k] float32`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def noise_weights(source: TrellisSource, *, seed: int = 0) -> TrellisWeights:
    """Arrays of noise for a layer without biases; scales keep activations of order one.

    Args:
        source: the layer; its codes one array for each linear.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    geometry, count = source.geometry, len(source.geometry.projections)
    shapes = [
        [_tiles(geometry.matrix(p), source, expert, i) for i, p in enumerate(geometry.projections)]
        for expert in range(geometry.num_experts)
    ]
    largest = max(int(np.prod(shape)) for row in shapes for shape in row)
    pool = rng.integers(-(2**15), 2**15, _POOL_LINEARS * largest, dtype=np.int16)

    def piece(shape: tuple[int, ...]) -> MemoryArray:
        size = int(np.prod(shape))
        first = int(rng.integers(0, (pool.size - size) // _STEP)) * _STEP
        return MemoryArray(pool[first : first + size].reshape(shape))

    experts, hidden, width = geometry.num_experts, geometry.padded_hidden_size, geometry.padded_intermediate_size
    middle = _scales(rng, (experts, count, width), hidden**-0.5)
    middle[:, -1] = _scales(rng, (experts, width), width**-0.5)
    inputs = (1 if source.joint_input_scales else count - 1, hidden)
    return TrellisWeights(
        codes=tuple(tuple(piece(shape) for shape in row) for row in shapes),
        rate=source.rates.rate_bytes(),
        input_scales=_scales(rng, inputs if source.shared_input_scales else (experts, *inputs), 1.0),
        intermediate_scales=middle,
        output_scales=_scales(rng, (hidden,) if source.shared_output_scales else (experts, hidden), 1.0),
        biases={},
    )


def random_routes(
    source: TrellisSource, tokens: int, top_k: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Routes:
    """Random tokens, each to different experts, with weights that add up to one; the same on every rank.

    Args:
        source: the layer.
        tokens: how many.
        top_k: routes of each.
        dtype: of x.
        device: where; made on the CPU, so that a seed means the same everywhere.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    geometry = source.geometry
    x = torch.randn(tokens, geometry.hidden_size, generator=generator).to(dtype)
    logits = torch.randn(tokens, geometry.num_experts, generator=generator)
    best = logits.topk(top_k, dim=1)
    return Routes(x.to(device), best.indices.to(device), best.values.softmax(dim=1).to(device))


def _tiles(matrix: tuple[int, int], source: TrellisSource, expert: int, projection: int) -> tuple[int, int, int]:
    return matrix[0] // 16, matrix[1] // 16, source.rates.rate(expert, projection).tile_words16


def _scales(rng: np.random.Generator, shape: tuple[int, ...], size: float) -> npt.NDArray[np.float16]:
    return (rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape) * size).astype(np.float16)
