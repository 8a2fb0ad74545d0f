"""Owns the torch decode of tiles.  It must not know scales or experts.

States are cut from the ring as `trellis_format.ring` does and looked up in the codebook's own table, so that values
are those of `trellis_format` bit for bit.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from trellis_format.codebooks import get_codebook
from trellis_format.rates import STATE_BITS, TILE, Rate
from trellis_format.tiles import POSITION
from trellis_kernels.arguments import check_table
from trellis_kernels.checks import check_device, check_dtype
from trellis_kernels.errors import KernelValueError

__all__ = ["decode"]

_CHUNK_TILES = 1 << 14  # tiles decoded at once, which bounds the temporaries to a few tens of MiB


@lru_cache(maxsize=32)
def _table(codebook: str, rate: Rate, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(get_codebook(codebook).table_for(rate).copy()).to(device)


def decode(codes: torch.Tensor, *, codebook: str, rate: Rate, table: str = "auto", out: torch.Tensor) -> torch.Tensor:
    """Decode tiles to the weight in the rotated basis; see `trellis_kernels.ops.decode`."""
    get_codebook(codebook).check_rate(rate)
    if table != "auto":  # both forms give the same values
        check_table(table, codebook, rate)
    check_dtype("codes", codes, torch.int16)
    check_dtype("out", out, torch.float16, torch.bfloat16, torch.float32)
    check_device(codes.device, out=out)
    if codes.ndim < 3 or codes.shape[-1] != rate.tile_words16:
        raise KernelValueError(
            f"codes of K = {rate} must be [..., k_tiles, n_tiles, {rate.tile_words16}], got {list(codes.shape)}"
        )
    *batch, k_tiles, n_tiles, words = codes.shape
    if list(out.shape) != [*batch, k_tiles * TILE, n_tiles * TILE]:
        wanted = [*batch, k_tiles * TILE, n_tiles * TILE]
        raise KernelValueError(f"out must be {wanted} for codes {list(codes.shape)}, got {list(out.shape)}")
    rows = codes.reshape(-1, n_tiles, words)
    bands = out.view(-1, TILE, n_tiles * TILE) if out.is_contiguous() else None
    if bands is None:
        raise KernelValueError(f"out must be contiguous, got strides {out.stride()}")
    weights = _table(codebook, rate, codes.device)
    place = torch.from_numpy(POSITION).to(codes.device)
    step = max(_CHUNK_TILES // max(n_tiles, 1), 1)
    for first in range(0, rows.shape[0], step):
        states = _states(rows[first : first + step], rate)
        values = weights[states[..., place]].view(*states.shape[:2], TILE, TILE)
        bands[first : first + step] = values.transpose(1, 2).reshape(-1, TILE, n_tiles * TILE)
    return out


def _states(tiles: torch.Tensor, rate: Rate) -> torch.Tensor:
    """`[..., 16*K] int16` to `[..., 256] int32` states in position order."""
    pairs = (tiles.to(torch.int32) & 0xFFFF).reshape(*tiles.shape[:-1], -1, 2)
    stream = pairs.flip(-1).reshape(tiles.shape)
    start = torch.from_numpy((rate.ends() - STATE_BITS) % rate.ring_bits).to(tiles.device)
    word, offset = start // STATE_BITS, (start % STATE_BITS).to(torch.int32)
    high, low = stream[..., word], stream[..., (word + 1) % rate.tile_words16]
    states: torch.Tensor = ((high << offset) | (low >> (STATE_BITS - offset))) & 0xFFFF
    return states
