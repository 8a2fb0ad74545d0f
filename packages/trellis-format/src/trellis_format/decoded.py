"""Owns the decode of one linear to a matrix, strip by strip.  It must not hold more than a strip of a file's linear.

A strip is 128 input channels, one Hadamard block, so that each can be rotated by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks import Codebook, get_codebook
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.exl3.linear import Exl3Linear
from trellis_format.exl3.linears import LinearVectors
from trellis_format.extent import BLOCK
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.rates import TILE, Rate
from trellis_format.reference import reconstruct
from trellis_format.slots import read_linear
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_format.tiles import decode_inner
from trellis_format.writer import Chunks, PlannedTensor

__all__ = ["DecodedDtype", "StoredLinear", "plan_decoded"]

DecodedDtype = Literal["float16", "float32"]
"""What a linear may be decoded to."""
_SAFETENSORS = {"float16": "F16", "float32": "F32"}
_STRIP_TILES = BLOCK // TILE


@dataclass(frozen=True)
class StoredLinear:
    """One linear of any container.

    Attributes:
        name: module name.
        codebook: the law from state to value.
        rate: K.
        codes: `[k/16, n/16, 16*K] int16`.
        suh: gives the input scale, `[k] float16`.
        svh: gives the output scale, `[n] float16`.
        bias: gives the bias after the output scale, `[n] float16`, or None where the linear has none.
        has_original_basis: whether undoing scales and rotations gives the model's own weight.
    """

    name: str
    codebook: Codebook
    rate: Rate
    codes: ArrayView
    suh: Callable[[], npt.NDArray[np.float16]]
    svh: Callable[[], npt.NDArray[np.float16]]
    bias: Callable[[], npt.NDArray[np.float16]] | None = None
    has_original_basis: bool = True

    @classmethod
    def of_exl3(cls, linear: Exl3Linear) -> StoredLinear:
        """A linear of an EXL3 checkpoint; its codes stay in the file."""
        return cls(
            linear.name,
            linear.codebook,
            linear.rate,
            linear.trellis,
            linear.read_input_scale,
            linear.read_output_scale,
            partial(_read_bias, linear) if "bias" in linear.tensors else None,
        )

    @classmethod
    def of_layer(
        cls, source: TrellisSource, weights: TrellisWeights, expert: int, projection: Projection, name: str
    ) -> StoredLinear:
        """A linear of a described layer; its codes are read.

        Args:
            source: the layer.
            weights: its arrays.
            expert: index.
            projection: which of the expert's linears.
            name: module name.
        """
        index = source.geometry.projections.index(projection)
        vectors = LinearVectors(source, lambda: weights, expert, projection)
        codes = MemoryArray(read_linear(source, weights, expert, index))
        rate = source.rates.rate(expert, index)
        bias = vectors.bias if projection in source.biased else None
        own_basis = source.expert_transform is None
        return cls(name, get_codebook(source.codebook), rate, codes, vectors.suh, vectors.svh, bias, own_basis)

    @property
    def shape(self) -> tuple[int, int]:
        """(k, n): input by output channels, with padding."""
        return self.codes.shape[0] * TILE, self.codes.shape[1] * TILE


def plan_decoded(
    linear: StoredLinear, *, dtype: DecodedDtype = "float16", original_basis: bool = False
) -> PlannedTensor:
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
        FormatUnsupportedError: if the original basis is asked for and the expert was quantised under an intermediate
            Hadamard, which no single linear undoes.
        FormatValueError: while it is written, if the file is short, a scale is not finite or a weight is beyond the
            range of `dtype`.
    """
    if original_basis and not linear.has_original_basis:
        text = "quantised under an intermediate Hadamard, so that no linear of the expert has an original basis alone"
        raise FormatUnsupportedError(text, tensor=linear.name)

    def chunks() -> Chunks:
        words = tuple(linear.codes.shape[1:])
        suh, svh = linear.suh(), linear.svh()
        for first in range(0, linear.codes.shape[0], _STRIP_TILES):
            box = (slice(first, first + _STRIP_TILES), slice(0, words[0]), slice(0, words[1]))
            raw = np.empty(2 * _STRIP_TILES * words[0] * words[1], dtype=np.uint8)
            linear.codes.read_box(box, raw)
            strip = raw.view("<i2").reshape(_STRIP_TILES, *words)
            if original_basis:
                part = suh[first * TILE : first * TILE + BLOCK]
                values: npt.NDArray[np.floating] = reconstruct(strip, part, svh, linear.codebook.name, linear.rate)
            else:
                values = decode_inner(strip, linear.codebook, linear.rate)
            yield _cast(values, dtype, linear).reshape(-1).view(np.uint8)

    name = f"{linear.name}.{'weight' if original_basis else 'inner'}"
    return PlannedTensor(name, _SAFETENSORS[dtype], linear.shape, chunks)


def _read_bias(linear: Exl3Linear) -> npt.NDArray[np.float16]:
    bias = linear.read_bias()
    assert bias is not None  # only of a linear that has one
    return bias


def _cast(values: npt.NDArray[np.floating], dtype: DecodedDtype, linear: StoredLinear) -> npt.NDArray[np.floating]:
    with np.errstate(over="ignore"):
        result = values.astype(np.dtype(dtype).newbyteorder("<"))
    if not np.isfinite(result).all():
        raise FormatValueError(
            f"a weight of magnitude {float(np.max(np.abs(values))):.3g} is beyond {dtype} "
            f"(largest {float(np.finfo(dtype).max):.3g}); decode to float32",
            tensor=linear.name,
        )
    return result
