"""Owns the blockwise Hadamard rotation of the last axis.  It must not know which tensors are rotated, or when.

The block matrix is Sylvester's in natural order divided by the square root of its size: entry signs
(-1)^popcount(i AND j), symmetric, its own inverse.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError

__all__ = ["HADAMARD_BLOCK", "hadamard"]

HADAMARD_BLOCK = 128
"""Channels of the block that every EXL3 linear uses on both sides."""


_Float = TypeVar("_Float", bound=np.floating[Any])


def hadamard(values: npt.NDArray[_Float], block: int = HADAMARD_BLOCK) -> npt.NDArray[_Float]:
    """Rotate the last axis block by block, in the precision of the input.

    Args:
        values: `[..., channels]` floating; a float64 input stays float64.
        block: channels of a block, a power of two.

    Returns:
        An array of the same shape and dtype.

    Raises:
        FormatTypeError: if the values are not floating.
        FormatValueError: if `block` is not a power of two or does not divide the last axis.
    """
    if not np.issubdtype(values.dtype, np.floating):
        raise FormatTypeError(f"a rotation needs floating values, got {values.dtype}")
    channels = values.shape[-1]
    if block < 1 or block & (block - 1):
        raise FormatValueError(f"Hadamard block {block} is not a power of two")
    if channels % block:
        near = [size for size in (channels // block * block, -(-channels // block) * block) if size]
        raise FormatValueError(
            f"{channels} channels are not a multiple of the Hadamard block {block}; nearest: "
            f"{' or '.join(map(str, near))}"
        )
    result = values.reshape(-1, block)
    half = 1
    while half < block:
        pairs = result.reshape(-1, block // (2 * half), 2, half)
        result = np.concatenate((pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]), axis=2)
        half *= 2
    scale = values.dtype.type(1.0 / math.sqrt(block))
    return (result.reshape(values.shape) * scale).astype(values.dtype, copy=False)
