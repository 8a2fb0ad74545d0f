"""Owns the intermediate Hadamard: an exact change of basis at the activation, and where its values lie.

It must not know codes or files.  The basis of the hidden axis is rotated in blocks of `pre_block`; gate and up share
one pre-activation axis of twice the width, even coordinates gate and odd ones up; what follows the activation is
rotated in blocks of `post_block`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.extent import SLOT, TrellisExtent

__all__ = ["ExpertTransform", "interleave"]

_SUPPORTED = (512, 128)  # the only blocks whose window order is published


@dataclass(frozen=True, kw_only=True)
class ExpertTransform:
    """The blocks of an intermediate Hadamard.

    Args:
        pre_block: channels of a block of the hidden axis, a power of two.
        post_block: channels of a block of the intermediate axis, a power of two.

    Raises:
        FormatTypeError: if a block is not an int.
        FormatValueError: if a block is not a power of two.
        FormatUnsupportedError: if the blocks are others than 512 and 128.
    """

    pre_block: int = _SUPPORTED[0]
    post_block: int = _SUPPORTED[1]

    def __post_init__(self) -> None:
        for name in ("pre_block", "post_block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatTypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < 1 or value & (value - 1):
                raise FormatValueError(f"{name} {value} is not a power of two")
        if (self.pre_block, self.post_block) != _SUPPORTED:
            raise FormatUnsupportedError(
                f"intermediate Hadamard of blocks {self.pre_block} and {self.post_block} is not handled; "
                f"supported: {_SUPPORTED[0]} and {_SUPPORTED[1]}"
            )

    def check(self, hidden_size: int, extent: TrellisExtent) -> None:
        """Accept a share that cuts no block.

        Raises:
            FormatValueError: if the hidden axis is not in whole blocks, or the share cuts one of the intermediate
                axis; names both numbers.
        """
        if hidden_size % self.pre_block:
            raise FormatValueError(
                f"the intermediate Hadamard needs hidden channels in blocks of {self.pre_block}, got {hidden_size}"
            )
        if extent.first_channel % self.post_block or extent.width % self.post_block:
            raise FormatValueError(
                f"the intermediate Hadamard needs extents in blocks of {self.post_block} channels, got "
                f"{extent.first_channel}..{extent.end_channel}"
            )

    @staticmethod
    def half(extent: TrellisExtent) -> int:
        """Which half of the slots a share lies in: 0 was quantised with gate's input vector, 1 with up's.

        Raises:
            FormatValueError: if it lies in both ("half"); names the boundary.
        """
        boundary = extent.global_intermediate_size // SLOT // 2
        end = extent.first_slot + extent.slot_count
        if extent.first_slot < boundary < end:
            raise FormatValueError(
                f"extent of slots {extent.first_slot}..{end} crosses the half boundary at slot {boundary}, across "
                f"which the input vectors of the intermediate Hadamard differ; nearest legal extents: "
                f"{extent.first_slot}..{boundary} and {boundary}..{end}"
            )
        return int(extent.first_slot >= boundary)


def interleave(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values of the two stored projections in the order of the pre-activation axis.

    Args:
        first: `[..., width]`, width a multiple of 64.
        second: the same shape.

    Returns:
        `[..., 2 * width]`: for each 64 channels, a slot of the first, of the second, of the first, of the second.
    """
    *batch, width = first.shape
    slots = [values.reshape(*batch, width // SLOT, SLOT) for values in (first, second)]
    return np.stack(slots, axis=-2).reshape(*batch, 2 * width)
