"""Owns the partition of the intermediate axis over tensor-parallel ranks.  It must not know tensors or devices."""

from __future__ import annotations

from trellis_format.extent import BLOCK, SLOT, TrellisExtent
from trellis_prep.errors import PrepTypeError, PrepValueError

__all__ = ["even_extents", "rank_extent"]


def even_extents(intermediate_size: int, world_size: int) -> tuple[TrellisExtent, ...]:
    """Share the axis evenly in Hadamard blocks; the first ranks take the remainder.

    Args:
        intermediate_size: channels of the (padded) axis, a multiple of 128.
        world_size: number of ranks.

    Returns:
        One extent per rank, ascending, without overlap or hole.

    Raises:
        PrepTypeError: if an argument is not an int.
        PrepValueError: if the axis is not a positive multiple of 128, or there are more ranks than blocks; names the
            largest world size.
    """
    for name, value in (("intermediate_size", intermediate_size), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise PrepTypeError(f"{name} must be an int, got {type(value).__name__}")
    if intermediate_size <= 0 or intermediate_size % BLOCK:
        near = max(-(-intermediate_size // BLOCK), 1) * BLOCK
        raise PrepValueError(f"axis of {intermediate_size} channels is not a multiple of {BLOCK}; nearest: {near}")
    blocks = intermediate_size // BLOCK
    if not 1 <= world_size <= blocks:
        raise PrepValueError(
            f"{world_size} ranks cannot share {intermediate_size} channels: a rank needs at least one block of "
            f"{BLOCK}, so the world size must be 1 to {blocks}"
        )
    share, remainder = divmod(blocks, world_size)
    extents, first = [], 0
    for rank in range(world_size):
        count = share + (rank < remainder)
        extents.append(
            TrellisExtent(
                global_intermediate_size=intermediate_size,
                first_slot=first * BLOCK // SLOT,
                slot_count=count * BLOCK // SLOT,
            )
        )
        first += count
    return tuple(extents)


def rank_extent(intermediate_size: int, rank: int, world_size: int) -> TrellisExtent:
    """One rank's extent of the even partition.

    Raises:
        PrepTypeError: if an argument is not an int.
        PrepValueError: if the rank is outside [0, world_size), or as `even_extents`.
    """
    extents = even_extents(intermediate_size, world_size)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise PrepTypeError(f"rank must be an int, got {type(rank).__name__}")
    if not 0 <= rank < world_size:
        raise PrepValueError(f"rank {rank} is outside 0..{world_size - 1}")
    return extents[rank]
