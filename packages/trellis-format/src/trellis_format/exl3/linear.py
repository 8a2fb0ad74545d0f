"""Owns the rules of one EXL3 linear, checked from headers alone.  It must not know experts or layers.

A linear `P` has `P.trellis` [k/16, n/16, 16 K] int16, `P.suh` [k] and `P.svh` [n] float16 (or packed signs `P.su`,
`P.sv`), at most one codebook marker `P.mcg` or `P.mul1`, and an optional `P.bias` [n].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks import EXL3_CODEBOOKS, Codebook
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import BLOCK
from trellis_format.files.arrays import FileArray
from trellis_format.rates import TILE, Rate

__all__ = ["LINEAR_SUFFIXES", "Exl3Linear", "describe_linear"]

_MARKERS = {codebook.marker: codebook for codebook in EXL3_CODEBOOKS.values() if codebook.marker is not None}
_UNMARKED = next(codebook for codebook in EXL3_CODEBOOKS.values() if codebook.marker is None)
_SIGN_WORD = 16  # channels whose signs one packed int16 holds

LINEAR_SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "bias", "scale", *_MARKERS)
"""Last name components of the tensors that belong to a linear."""


@dataclass(frozen=True)
class Exl3Linear:
    """One EXL3 linear as its headers describe it.

    Attributes:
        name: module name, without a suffix.
        codebook: from the marker tensor; no marker is 3inst.
        rate: K, from the width of the trellis.
        k: stored input channels.
        n: stored output channels.
        tensors: its tensors by suffix.
    """

    name: str
    codebook: Codebook
    rate: Rate
    k: int
    n: int
    tensors: Mapping[str, FileArray] = field(repr=False)

    @property
    def trellis(self) -> FileArray:
        """The codes, `[k/16, n/16, 16*K] int16`."""
        return self.tensors["trellis"]

    @property
    def file(self) -> str:
        """Path of the shard that holds the codes."""
        return self.trellis.file

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read_input_scale(self) -> npt.NDArray[np.float16]:
        """`[k] float16`: suh, or the packed signs su as +1 and -1.

        Raises:
            FormatValueError: if a value is not finite.
        """
        return self._read_scale("suh", "su")

    def read_output_scale(self) -> npt.NDArray[np.float16]:
        """`[n] float16`: svh, or the packed signs sv as +1 and -1.

        Raises:
            FormatValueError: if a value is not finite.
        """
        return self._read_scale("svh", "sv")

    def read_bias(self) -> npt.NDArray[np.float16] | None:
        """`[n] float16`: the bias, cast to float16 where the file has float32; None where there is none.

        Raises:
            FormatValueError: if a value is not finite in float16.
        """
        if "bias" not in self.tensors:
            return None
        with np.errstate(over="ignore"):
            bias = self.tensors["bias"].read().astype(np.float16)
        self._check_finite("bias", bias)
        return bias

    def check_marker(self) -> None:
        """Read the codebook marker and compare it with the codebook's multiplier.

        Raises:
            FormatValueError: if they differ; names both in hexadecimal.
        """
        marker = self.codebook.marker
        if marker is None:
            return
        found, expected = int(self.tensors[marker].read().item()) & 0xFFFFFFFF, self.codebook.multiplier
        if found != expected:
            raise FormatValueError(
                f"marker of codebook {marker} is 0x{found:08X}, expected 0x{expected:08X}: files with another "
                "multiplier are refused, since their codes have another meaning",
                file=self.file,
                tensor=f"{self.name}.{marker}",
                numbers={"observed": found, "expected": expected or 0},
            )

    def _read_scale(self, plain: str, packed: str) -> npt.NDArray[np.float16]:
        if plain in self.tensors:
            scale: npt.NDArray[np.float16] = self.tensors[plain].read()
            self._check_finite(plain, scale)
            return scale
        words = self.tensors[packed].read().view(np.uint16)
        negative = (words[:, None] >> np.arange(_SIGN_WORD, dtype=np.uint16)) & np.uint16(1)
        return (1.0 - 2.0 * negative.reshape(-1)).astype(np.float16)

    def _check_finite(self, suffix: str, values: npt.NDArray[np.float16]) -> None:
        if not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            raise FormatValueError(
                f"all values must be finite; value {values[first]} at index {first}",
                file=self.file,
                tensor=f"{self.name}.{suffix}",
                numbers={"index": first},
            )


def describe_linear(name: str, tensors: Mapping[str, FileArray]) -> Exl3Linear:
    """Describe one linear from the headers of its tensors.

    Args:
        name: module name.
        tensors: its tensors by suffix, `trellis` among them.

    Raises:
        FormatTypeError: if a tensor has the wrong dtype.
        FormatValueError: if a shape, the rate, or the set of tensors breaks a rule; names the file, the tensor, both
            numbers and the rule.
    """
    trellis = tensors["trellis"]
    file, where = trellis.file, f"{name}.trellis"
    if trellis.entry.dtype != "I16":
        raise FormatTypeError(f"trellis must be int16 (I16), got {trellis.entry.dtype}", file=file, tensor=where)
    if len(trellis.shape) != 3:
        kind = "quantised embedding, not a linear; " if len(trellis.shape) == 2 else ""
        raise FormatValueError(
            f"{kind}trellis of a linear must be 3-D [k/16, n/16, 16*K], got shape {list(trellis.shape)}",
            file=file,
            tensor=where,
            numbers={"observed": len(trellis.shape), "expected": 3},
        )
    k, n = trellis.shape[0] * TILE, trellis.shape[1] * TILE
    if not k or not n or k % BLOCK or n % BLOCK:
        legal = " x ".join(str(max(-(-side // BLOCK), 1) * BLOCK) for side in (k, n))
        raise FormatValueError(
            f"linear of {k} x {n} channels: both sides must be positive multiples of {BLOCK}; nearest: {legal}",
            file=file,
            tensor=where,
            numbers={"k": k, "n": n, "multiple": BLOCK},
        )
    codebook = _codebook(name, tensors, file)
    try:
        rate = Rate.from_width(trellis.shape[2])
        codebook.check_rate(rate)
    except FormatValueError as error:
        raise FormatValueError(error.message, file=file, tensor=where, numbers={"width": trellis.shape[2]}) from error
    _check_vector(name, tensors, "suh", "su", k, file)
    _check_vector(name, tensors, "svh", "sv", n, file)
    if "bias" in tensors:
        _check_tensor(name, "bias", tensors["bias"], ("F16", "F32"), (n,))
    return Exl3Linear(name, codebook, rate, k, n, dict(tensors))


def _codebook(name: str, tensors: Mapping[str, FileArray], file: str) -> Codebook:
    present = [marker for marker in _MARKERS if marker in tensors]
    if len(present) > 1:
        raise FormatValueError(
            f"both codebook markers {' and '.join(present)} are present; a linear has at most one",
            file=file,
            tensor=name,
        )
    if not present:
        return _UNMARKED
    marker = tensors[present[0]]
    if marker.shape != () or marker.entry.dtype not in ("I32", "U32"):
        raise FormatTypeError(
            f"codebook marker must be a scalar int32 or uint32, got {marker.entry.dtype} {list(marker.shape)}",
            file=marker.file,
            tensor=f"{name}.{present[0]}",
        )
    return _MARKERS[present[0]]


def _check_vector(
    name: str, tensors: Mapping[str, FileArray], plain: str, packed: str, channels: int, file: str
) -> None:
    if plain in tensors and packed in tensors:
        raise FormatValueError(f"both {plain} and {packed} are present; a linear has one", file=file, tensor=name)
    if plain in tensors:
        _check_tensor(name, plain, tensors[plain], ("F16",), (channels,))
    elif packed in tensors:
        _check_tensor(name, packed, tensors[packed], ("I16",), (channels // _SIGN_WORD,))
    else:
        raise FormatValueError(
            f"{plain} is missing: a linear needs {plain} of {channels} values", file=file, tensor=f"{name}.{plain}"
        )


_DTYPE_NAMES: dict[str, Any] = {"F16": "float16", "F32": "float32", "I16": "int16"}


def _check_tensor(name: str, suffix: str, tensor: FileArray, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    where = f"{name}.{suffix}"
    if tensor.entry.dtype not in dtypes:
        wanted = " or ".join(f"{_DTYPE_NAMES[dtype]} ({dtype})" for dtype in dtypes)
        raise FormatTypeError(f"must be {wanted}, got {tensor.entry.dtype}", file=tensor.file, tensor=where)
    if tensor.shape != shape:
        raise FormatValueError(
            f"has shape {list(tensor.shape)}, the trellis needs length {shape[0]} (shape {list(shape)})",
            file=tensor.file,
            tensor=where,
            numbers={"observed": math.prod(tensor.shape), "expected": shape[0]},
        )
