"""Owns the place of each ring position in its 16 x 16 tile, and the decode of stored tiles.  It must not know scales.

The map is the register layout of two `mma.m16n8k16` B operands: lane t // 8 holds positions 8*lane to 8*lane + 7, which
are its own fragments, so that a warp decodes straight into the operand without a shuffle.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks import Codebook
from trellis_format.errors import FormatValueError
from trellis_format.rates import TILE, TILE_WEIGHTS, Rate
from trellis_format.ring import unpack_states

__all__ = ["COLUMN", "ELEMENT", "POSITION", "ROW", "decode_inner", "join_tiles", "split_tiles"]

_T = np.arange(TILE_WEIGHTS)
_LANE, _J = _T >> 3, _T & 7

ROW: npt.NDArray[np.int64] = 2 * (_LANE & 3) + (_J & 1) + 8 * ((_J >> 1) & 1)
"""`[256] int64`: input row (k) of each position within its tile."""
COLUMN: npt.NDArray[np.int64] = (_LANE >> 2) + 8 * (_J >> 2)
"""`[256] int64`: output column (n) of each position within its tile."""
ELEMENT: npt.NDArray[np.int64] = TILE * ROW + COLUMN
"""`[256] int64`: row-major element 16*row + column of each position."""
POSITION: npt.NDArray[np.int64] = np.argsort(ELEMENT)
"""`[256] int64`: position of each row-major element, the inverse of `ELEMENT`."""


def decode_inner(trellis: npt.NDArray[np.int16], codebook: Codebook, rate: Rate) -> npt.NDArray[np.float16]:
    """Decode stored tiles to the weight in the rotated basis.

    Args:
        trellis: `[k_tiles, n_tiles, 16*K] int16`.
        codebook: the law from state to value.
        rate: K.

    Returns:
        `[16*k_tiles, 16*n_tiles] float16`, input channels by output channels, exact.

    Raises:
        FormatTypeError: if the words are not 16-bit.
        FormatValueError: if the width is not 16*K, the array not 3-D, or K not legal for the codebook.
    """
    if trellis.ndim != 3:
        raise FormatValueError(f"trellis must be 3-D [k_tiles, n_tiles, 16*K], got shape {trellis.shape}")
    codebook.check_rate(rate)
    return join_tiles(codebook.decode(unpack_states(trellis, rate), rate))


def join_tiles(values: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    """`[k_tiles, n_tiles, 256]` values in position order to the `[k, n]` matrix."""
    k_tiles, n_tiles, _ = values.shape
    blocks = values[..., POSITION].reshape(k_tiles, n_tiles, TILE, TILE)
    return blocks.transpose(0, 2, 1, 3).reshape(k_tiles * TILE, n_tiles * TILE)


def split_tiles(matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """A `[k, n]` matrix to `[k_tiles, n_tiles, 256]` values in position order; the inverse of `join_tiles`.

    Raises:
        FormatValueError: if a side is not a multiple of 16.
    """
    k, n = matrix.shape
    if k % TILE or n % TILE:
        raise FormatValueError(f"matrix of {k} x {n} does not divide into tiles of {TILE} x {TILE}")
    blocks = matrix.reshape(k // TILE, TILE, n // TILE, TILE).transpose(0, 2, 1, 3)
    return blocks.reshape(k // TILE, n // TILE, TILE_WEIGHTS)[..., ELEMENT]
