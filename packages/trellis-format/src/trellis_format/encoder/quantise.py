"""Owns the quantisation of one small matrix: scales, rotations, codes.  It must not know files or activations.

Without a Hessian, so that no calibration is needed: W = diag(suh) H W_hat H diag(svh) with svh from the root mean
square of each output channel, suh from that of each input channel after the output rotation, both with random signs,
rounded to float16 before the codes are searched, so that the codes answer the scales that are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks import Codebook, get_codebook
from trellis_format.encoder.viterbi import encode_tiles
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import BLOCK
from trellis_format.hadamard import hadamard
from trellis_format.rates import TILE_WEIGHTS, Rate
from trellis_format.ring import pack_states
from trellis_format.tiles import split_tiles

__all__ = ["Quantised", "quantise"]

_Half = npt.NDArray[np.float16]
_Double = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Quantised:
    """A quantised matrix, as `trellis_format.reference.reconstruct` takes it.

    Attributes:
        trellis: `[k/16, n/16, 16*K] int16`.
        suh: `[k] float16`.
        svh: `[n] float16`.
    """

    trellis: npt.NDArray[np.int16]
    suh: _Half
    svh: _Half


def quantise(matrix: npt.NDArray[np.floating], rate: Rate, codebook: str, *, seed: int = 0) -> Quantised:
    """Quantise a matrix by itself, without calibration.

    A channel of zeros gets scale 0 and so stays zero, as padding must.  Takes about 100 us for a weight.

    Args:
        matrix: `[k, n]` floating, input by output channels, both multiples of 128.
        rate: K.
        codebook: its name.
        seed: of the random signs.

    Raises:
        FormatTypeError: if the matrix is not floating.
        FormatValueError: if a side is not a positive multiple of 128, a value is not finite or so large or small that
            float16 does not hold its channel's scale, or K is not legal for the codebook.
    """
    law = get_codebook(codebook)
    law.check_rate(rate)
    weight = _checked(matrix)
    rng = np.random.default_rng(seed)
    columns = _rms(weight, axis=0)
    nonzero = columns[columns > 0]
    svh = _scale(columns / nonzero.mean() if nonzero.size else columns, rng, "output")
    rotated = hadamard(_divide(weight, svh))
    suh = _scale(_rms(rotated, axis=1) / (_spread(law, rate) * _gain(rate)), rng, "input")
    inner = hadamard(_divide(rotated.T, suh)).T
    tiles = split_tiles(inner)
    states = encode_tiles(tiles.reshape(-1, TILE_WEIGHTS), law, rate)
    return Quantised(pack_states(states.reshape(tiles.shape), rate), suh, svh)


def _checked(matrix: npt.NDArray[np.floating]) -> _Double:
    if not np.issubdtype(matrix.dtype, np.floating):
        raise FormatTypeError(f"a matrix to quantise must be floating, got {matrix.dtype}")
    if matrix.ndim != 2 or not matrix.size or matrix.shape[0] % BLOCK or matrix.shape[1] % BLOCK:
        near = " x ".join(str(max(-(-side // BLOCK), 1) * BLOCK) for side in matrix.shape[:2])
        raise FormatValueError(
            f"matrix of shape {list(matrix.shape)}: both sides must be positive multiples of {BLOCK}; nearest: {near}"
        )
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        raise FormatValueError(f"matrix must be finite; it has {matrix[row, column]} at [{row}, {column}]")
    return matrix.astype(np.float64)


def _rms(values: _Double, axis: int) -> _Double:
    peak = np.max(np.abs(values), initial=0.0) or 1.0  # squares of extreme values would leave float64
    rms: _Double = peak * np.sqrt(np.mean(np.square(values / peak), axis=axis))
    return rms


def _spread(codebook: Codebook, rate: Rate) -> float:
    return float(codebook.table_for(rate).astype(np.float64).std())


def _gain(rate: Rate) -> float:
    """Spread of the values to encode over that of the codebook.

    Rotated weights are near normal.  Few bits gain from values that reach past the codebook, many bits lose by every
    value that its largest entry cuts off; this line is within 2% of the least error at every rate of 3inst, mcg and
    mul1.
    """
    return max(1.1 - 0.05 * rate.bits, 0.8)


def _scale(magnitudes: _Double, rng: np.random.Generator, side: str) -> _Half:
    """Magnitudes with random signs in float16; zero stays zero, anything else must not become zero or infinite."""
    with np.errstate(over="ignore", under="ignore"):
        scale: _Half = (magnitudes * rng.choice([-1.0, 1.0], magnitudes.shape)).astype(np.float16)
    lost = ~np.isfinite(scale) | ((scale == 0) != (magnitudes == 0))
    if lost.any():
        channel = int(np.flatnonzero(lost)[0])
        raise FormatValueError(
            f"{side} channel {channel} needs a scale of {magnitudes[channel]:.3g}, which float16 does not hold "
            f"(2^-24 to 65504); multiply the matrix by a constant"
        )
    return scale


def _divide(values: _Double, scale: _Half) -> _Double:
    """The last axis divided by its scale, zero where the scale is."""
    divisor = np.where(scale == 0, np.inf, scale.astype(np.float64))
    result: _Double = values / divisor
    return result
