"""Owns the sign patterns of the intermediate Hadamard: eight frozen draws for each of two axes.

It must not know where signs are applied.  Pattern 0 is all +1.  Another pattern p of axis a (1 = before, 2 = after the
activation) takes the classic Mersenne Twister, seeded with the low 32 bits of

    (0x6A09E667F3BCC909 * p + 0xBB67AE8584CAA73B * a) mod 2^63

one 32-bit output for each element, and its lowest bit: 1 is +1, 0 is -1.  A share is cut out of the draw of the whole
axis, because a draw of local length would be another one.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import TrellisExtent

__all__ = ["PATTERNS", "SignAxis", "check_patterns", "expert_signs", "pattern_seed", "pattern_signs"]

PATTERNS = 8
"""Number of sign patterns."""

_PATTERN_FACTOR = 0x6A09E667F3BCC909
_AXIS_FACTOR = 0xBB67AE8584CAA73B
_SEED_MASK = (1 << 63) - 1


class SignAxis(IntEnum):
    """Where the signs of an axis are applied; the value enters the seed."""

    PRE = 1
    """Before the activation: two signs for each intermediate channel, gate and up interleaved."""
    POST = 2
    """After the activation: one sign for each intermediate channel."""

    @property
    def per_channel(self) -> int:
        """Signs of one intermediate channel."""
        return 2 if self is SignAxis.PRE else 1


def pattern_seed(pattern: int, axis: SignAxis) -> int:
    """The 63-bit seed of a pattern."""
    return _PATTERN_FACTOR * pattern + _AXIS_FACTOR * axis & _SEED_MASK


@lru_cache(maxsize=64)
def pattern_signs(pattern: int, axis: SignAxis, intermediate_size: int) -> npt.NDArray[np.int8]:
    """The signs of a whole axis.

    Args:
        pattern: 0 to 7.
        axis: before or after the activation.
        intermediate_size: channels of the whole intermediate axis, over all ranks.

    Returns:
        `[per_channel * intermediate_size] int8`, +1 and -1, read-only.

    Raises:
        FormatValueError: if there is no such pattern.
    """
    if not 0 <= pattern < PATTERNS:
        raise FormatValueError(f"sign pattern {pattern} does not exist; patterns are 0..{PATTERNS - 1}")
    length = axis.per_channel * intermediate_size
    if pattern == 0:
        signs = np.ones(length, dtype=np.int8)
    else:
        twister = np.random.RandomState(pattern_seed(pattern, axis) & 0xFFFFFFFF)  # the law names MT19937
        words = twister.randint(0, 1 << 32, length, dtype=np.uint32)
        signs = ((words & 1).astype(np.int8) << 1) - 1
    signs.setflags(write=False)
    return signs


def expert_signs(patterns: npt.NDArray[np.uint8], axis: SignAxis, extent: TrellisExtent) -> npt.NDArray[np.int8]:
    """The signs of a share for every expert.

    Args:
        patterns: `[experts] uint8`.
        axis: before or after the activation.
        extent: the share; the draw is that of its whole axis.

    Returns:
        `[experts, per_channel * width] int8`, +1 and -1.

    Raises:
        FormatTypeError, FormatValueError: as `check_patterns`.
    """
    check_patterns(patterns, len(patterns))
    share = slice(extent.first_channel * axis.per_channel, extent.end_channel * axis.per_channel)
    size = extent.global_intermediate_size
    return np.stack([pattern_signs(pattern, axis, size)[share] for pattern in patterns.tolist()])


def check_patterns(patterns: npt.NDArray[np.uint8], num_experts: int) -> None:
    """Accept the patterns of a layer.

    Args:
        patterns: `[experts] uint8`.
        num_experts: experts of the layer.

    Raises:
        FormatValueError: if the dtype, the shape or a value is wrong; names the first bad expert and its value.
    """
    if not isinstance(patterns, np.ndarray):
        raise FormatTypeError(f"sign_pattern must be an array, got {type(patterns).__name__}")
    if patterns.dtype != np.uint8 or patterns.shape != (num_experts,):
        raise FormatValueError(
            f"sign_pattern must be uint8 [{num_experts}], one for each expert, got {patterns.dtype} "
            f"{list(patterns.shape)}"
        )
    wrong = np.flatnonzero(patterns >= PATTERNS)
    if wrong.size:
        first = int(wrong[0])
        raise FormatValueError(f"sign_pattern of expert {first} is {patterns[first]}; patterns are 0..{PATTERNS - 1}")
