"""Owns the decode of one linear to a matrix, strip by strip.  It must not hold more than a strip of it.

A strip is 128 input channels, one Hadamard block, so that each can be rotated by itself.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatValueError
from trellis_format.exl3.linear import Exl3Linear
from trellis_format.extent import BLOCK
from trellis_format.rates import TILE
from trellis_format.reference import reconstruct
from trellis_format.tiles import decode_inner
from trellis_format.writer import Chunks, PlannedTensor

__all__ = ["DecodedDtype", "plan_decoded"]

DecodedDtype = Literal["float16", "float32"]
"""What a linear may be decoded to."""
_SAFETENSORS = {"float16": "F16", "float32": "F32"}
_STRIP_TILES = BLOCK // TILE


def plan_decoded(linear: Exl3Linear, *, dtype: DecodedDtype = "float16", original_basis: bool = False) -> PlannedTensor:
    """Plan a linear's decoded matrix as a tensor to write.

    Args:
        linear: the linear.
        dtype: of the values.  Codebook values are exact in both; in the original basis they are computed in float64
            and rounded once.
        original_basis: whether to undo scales and rotations, W = diag(suh) H W_hat H diag(svh), instead of giving the
            codebook values W_hat as they are stored.

    Returns:
        A plan of `[k, n]`, input by output channels with padding, named `<module>.weight` in the original basis and
        `<module>.inner` otherwise.

    Raises:
        FormatValueError: while it is written, if the file is short, a scale is not finite or a weight is beyond the
            range of `dtype`.
    """

    def chunks() -> Chunks:
        codes = linear.trellis
        words = tuple(codes.shape[1:])
        suh, svh = linear.read_input_scale(), linear.read_output_scale()
        for first in range(0, codes.shape[0], _STRIP_TILES):
            box = (slice(first, first + _STRIP_TILES), slice(0, words[0]), slice(0, words[1]))
            raw = np.empty(2 * _STRIP_TILES * words[0] * words[1], dtype=np.uint8)
            codes.read_box(box, raw)
            strip = raw.view("<i2").reshape(_STRIP_TILES, *words)
            if original_basis:
                part = suh[first * TILE : first * TILE + BLOCK]
                values: npt.NDArray[np.floating] = reconstruct(strip, part, svh, linear.codebook.name, linear.rate)
            else:
                values = decode_inner(strip, linear.codebook, linear.rate)
            yield _cast(values, dtype, linear).reshape(-1).view(np.uint8)

    name = f"{linear.name}.{'weight' if original_basis else 'inner'}"
    return PlannedTensor(name, _SAFETENSORS[dtype], (linear.k, linear.n), chunks)


def _cast(values: npt.NDArray[np.floating], dtype: DecodedDtype, linear: Exl3Linear) -> npt.NDArray[np.floating]:
    with np.errstate(over="ignore"):
        result = values.astype(np.dtype(dtype).newbyteorder("<"))
    if not np.isfinite(result).all():
        raise FormatValueError(
            f"a weight of magnitude {float(np.max(np.abs(values))):.3g} is beyond {dtype} "
            f"(largest {float(np.finfo(dtype).max):.3g}); decode to float32",
            file=linear.file,
            tensor=linear.name,
        )
    return result
