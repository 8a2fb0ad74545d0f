"""Owns the extent: a rank's share of the intermediate axis, in source coordinates.

It must not know ranks or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from trellis_format.errors import FormatTypeError, FormatValueError

__all__ = ["BLOCK", "BLOCK_SLOTS", "SLOT", "TrellisExtent"]

SLOT = 32
"""Channels of a slot, the grain in which slot-major codes lie."""
BLOCK = 128
"""Channels of a Hadamard block, the grain in which EXL3 weights may be split."""
BLOCK_SLOTS = BLOCK // SLOT
"""Slots of a Hadamard block."""


@dataclass(frozen=True, kw_only=True)
class TrellisExtent:
    """A contiguous range of the intermediate axis.

    Trellis rows, scales, signs and rate cells of a shard are all sliced by the same extent, so that a shard can never
    be put together from parts of different ranges, nor regenerated at local size.

    Args:
        global_intermediate_size: channels of the whole (padded) intermediate axis; a positive multiple of 32.
        first_slot: first slot of the range, in slots of 32 channels.
        slot_count: slots in the range; 0 is an empty share.

    Raises:
        FormatTypeError: if a field is not an int.
        FormatValueError: if the range is outside the axis or the axis is not a multiple of 32 channels.
    """

    global_intermediate_size: int
    first_slot: int
    slot_count: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatTypeError(f"extent {field.name} must be an int, got {type(value).__name__}")
        size, end = self.global_intermediate_size, self.first_slot + self.slot_count
        if size <= 0 or size % SLOT:
            raise FormatValueError(f"extent over {size} channels: the axis must be a positive multiple of {SLOT}")
        if self.first_slot < 0 or self.slot_count < 0 or end * SLOT > size:
            raise FormatValueError(
                f"extent of slots {self.first_slot}..{end} is outside the axis of {size // SLOT} slots "
                f"({size} channels)"
            )

    @classmethod
    def whole(cls, intermediate_size: int) -> TrellisExtent:
        """The extent that covers an axis of `intermediate_size` channels."""
        return cls(
            global_intermediate_size=intermediate_size, first_slot=0, slot_count=max(intermediate_size // SLOT, 0)
        )

    @property
    def first_channel(self) -> int:
        """First channel of the range."""
        return self.first_slot * SLOT

    @property
    def width(self) -> int:
        """Channels in the range."""
        return self.slot_count * SLOT

    @property
    def end_channel(self) -> int:
        """Channel just past the range."""
        return self.first_channel + self.width

    @property
    def is_whole(self) -> bool:
        """Whether the range is the whole axis."""
        return self.width == self.global_intermediate_size

    @property
    def channels(self) -> slice:
        """The range as a slice of a channel axis."""
        return slice(self.first_channel, self.end_channel)

    @property
    def tiles(self) -> slice:
        """The range as a slice of an axis of 16-channel tiles."""
        return slice(self.first_channel // 16, self.end_channel // 16)

    def check_blocks(self) -> None:
        """Accept a range that cuts no Hadamard block of 128 channels.

        Raises:
            FormatValueError: if it cuts one; names the range and the nearest legal one.
        """
        if self.first_channel % BLOCK == 0 and self.width % BLOCK == 0:
            return
        low = self.first_channel // BLOCK * BLOCK
        high = min(-(-self.end_channel // BLOCK) * BLOCK, self.global_intermediate_size // BLOCK * BLOCK)
        raise FormatValueError(
            f"extent of channels {self.first_channel}..{self.end_channel} cuts a Hadamard block of {BLOCK}; "
            f"nearest legal extent: {low}..{high}"
        )
