"""Owns the planners that share an intermediate axis with barriers.  It must not know tensors or devices.

All ranks of a run must use one planner: the two agree at many world sizes and not at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trellis_format.extent import BLOCK_SLOTS, SLOT, TrellisExtent
from trellis_prep.errors import PrepValueError
from trellis_prep.extents import check_grain, check_int, count_units, lay_out, split_evenly

__all__ = ["balanced_extents", "partition_extents", "rotation_step"]


def partition_extents(
    intermediate_size: int, world_size: int, *, alignment_slots: int = BLOCK_SLOTS, barriers: Sequence[int] = ()
) -> tuple[TrellisExtent, ...]:
    """Share the axis so that no rank crosses a barrier and the widest rank of each segment is as narrow as possible.

    Barriers cut the axis into segments.  Each segment has one rank; every further rank goes to the segment whose
    widest rank is widest (ties: the larger segment, then the first).  Within a segment shares are even.

    Args:
        intermediate_size: channels of the axis, a multiple of the alignment.
        world_size: number of ranks.
        alignment_slots: what every share is a multiple of, in slots of 32 channels.
        barriers: slots that no extent may have strictly inside.

    Returns:
        One extent per rank, ascending, without overlap, hole or empty share.

    Raises:
        PrepTypeError: if a number is not an int.
        PrepValueError: if the alignment does not divide the axis, a barrier is not an aligned slot inside it, or the
            world size is below the number of segments or above that of aligned units; names both bounds.
    """
    units = count_units(intermediate_size, alignment_slots)
    check_grain(intermediate_size // SLOT, alignment_slots, barriers)
    check_int("world_size", world_size)
    cuts = [0, *sorted(barrier // alignment_slots for barrier in barriers), units]
    segments = [end - first for first, end in pairwise(cuts)]
    if not len(segments) <= world_size <= units:
        raise PrepValueError(
            f"{world_size} ranks cannot share {intermediate_size} channels in {len(segments)} segments of together "
            f"{units} units of {alignment_slots * SLOT} channels: the world size must be {len(segments)} to {units}"
        )
    ranks = [1] * len(segments)
    for _ in range(world_size - len(segments)):
        widest = max(range(len(segments)), key=lambda i: (-(-segments[i] // ranks[i]), segments[i], -i))
        ranks[widest] += 1
    shares = [share for segment, count in zip(segments, ranks, strict=True) for share in split_evenly(segment, count)]
    return lay_out(intermediate_size, [share * alignment_slots for share in shares])


def balanced_extents(
    intermediate_size: int, world_size: int, layer: int = 0, *, alignment_slots: int = BLOCK_SLOTS
) -> tuple[TrellisExtent, ...]:
    """Share an axis with a barrier in its middle, and rotate who owns what from layer to layer.

    The first half has ceil(world / 2) ranks; each half is shared evenly.  At the layer's position p, rank r has share
    (r + step * p) mod world of the ascending list, so that over many layers all ranks hold about the same.

    Args:
        intermediate_size: channels of the axis; each half must be a multiple of the alignment.
        world_size: number of ranks, at least 2.
        layer: position among the model's expert layers, from 0.
        alignment_slots: what every share is a multiple of, in slots of 32 channels.

    Returns:
        The extent of each rank, in the order of ranks.

    Raises:
        PrepTypeError: if a number is not an int.
        PrepValueError: if a half is not a multiple of the alignment, the layer is negative, or there are fewer than 2
            ranks or more than units; names both bounds.
    """
    units = count_units(intermediate_size, 2 * alignment_slots)  # of each half
    check_int("world_size", world_size)
    check_int("layer", layer)
    if not 2 <= world_size <= 2 * units:
        raise PrepValueError(
            f"{world_size} ranks cannot share {intermediate_size} channels in two halves of {units} units of "
            f"{alignment_slots * SLOT} channels: the world size must be 2 to {2 * units}"
        )
    if layer < 0:
        raise PrepValueError(f"layer position must be 0 or more, got {layer}")
    first = -(-world_size // 2)
    shares = split_evenly(units, first) + split_evenly(units, world_size - first)
    ordered = lay_out(intermediate_size, [share * alignment_slots for share in shares])
    turn = rotation_step(world_size) * layer
    return tuple(ordered[(rank + turn) % world_size] for rank in range(world_size))


def rotation_step(world_size: int) -> int:
    """Shares by which ownership moves per layer in `balanced_extents`: 1, and 2 for 10 ranks."""
    return 2 if world_size == 10 else 1
