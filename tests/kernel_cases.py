"""Owns what tests of trellis-kernels share: random tiles and banks, and the law of packing as a loop.

It must not know backends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trellis_format.codebooks import CODEBOOKS, get_codebook
from trellis_format.rates import Rate
from trellis_format.tiles import decode_inner
from trellis_kernels import CodeBank

PAIRS = [
    pytest.param(name, rate, id=f"{name}-{rate}")
    for name, codebook in CODEBOOKS.items()
    for rate in codebook.legal_rates
]
"""Every codebook at every rate that it is legal for."""


def random_codes(*shape: int, rate: Rate, seed: int = 0) -> npt.NDArray[np.int16]:
    """Tiles of random bits, which are all legal: `[*shape, 16*K] int16`."""
    rng = np.random.default_rng([seed, rate.half_bits, *shape])
    return rng.integers(-(2**15), 2**15, (*shape, rate.tile_words16), dtype=np.int16)


def random_bank(
    codebook: str, rates: list[Rate], k: int, n: int, seed: int = 0
) -> tuple[CodeBank, npt.NDArray[np.float64]]:
    """A bank of one expert for each rate, with words between experts that are nobody's, and its exact weights.

    Returns:
        The bank, and `[experts, k, n] float64`.
    """
    pieces: list[npt.NDArray[np.int32]] = []
    places, weights, first = [], [], 0
    for expert, rate in enumerate(rates):
        gap = np.full(4 * (expert % 3), -1, np.int32)
        codes = random_codes(k // 16, n // 16, rate=rate, seed=seed + expert)
        words = codes.reshape(-1).view(np.int32)
        places.append((first + gap.size, rate.half_bits))
        first += gap.size + words.size
        pieces += [gap, words]
        weights.append(decode_inner(codes, get_codebook(codebook), rate).astype(np.float64))
    words = torch.from_numpy(np.concatenate(pieces))
    descriptors = torch.tensor(places, dtype=torch.int64)
    return CodeBank(codebook, k, n, words, descriptors, tuple(places)), np.stack(weights)


def packed_by_loop(ids: npt.NDArray[np.integer], num_experts: int, block_rows: int) -> dict[str, list[int]]:
    """The law of packing, stated as a loop: the used slots and blocks, and the segments."""
    flat = [int(id_) for id_ in ids.reshape(-1)]
    slots: list[int] = []
    blocks: list[int] = []
    offsets, counts = [0], []
    for expert in range(num_experts):
        mine = [route for route, id_ in enumerate(flat) if id_ == expert]
        padding = -len(mine) % block_rows
        slots += mine + [len(flat)] * padding
        blocks += [expert] * ((len(mine) + padding) // block_rows)
        offsets.append(len(slots))
        counts.append(len(mine))
    return {"slots": slots, "blocks": blocks, "offsets": offsets, "counts": counts}


def as_bits(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Bytes of a tensor, so that comparison is of bits."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """An output that no op has written: all NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def relative_error(found: torch.Tensor, truth: npt.NDArray[np.float64]) -> float:
    """Norm of the difference over the norm of the truth."""
    difference = found.detach().cpu().double().numpy() - truth
    return float(np.linalg.norm(difference) / np.linalg.norm(truth))
