"""Owns which extents are legal, and the even share of the intermediate axis.  It must not know tensors or devices."""

from __future__ import annotations

from collections.abc import Sequence

from trellis_format.extent import BLOCK_SLOTS, SLOT, TrellisExtent
from trellis_prep.errors import PrepTypeError, PrepValueError

__all__ = ["check_extent", "check_index", "check_int", "even_extents", "rank_extent"]


def check_extent(
    extent: TrellisExtent, *, alignment_slots: int = BLOCK_SLOTS, barriers: Sequence[int] = ()
) -> TrellisExtent:
    """Accept an extent whose ends are aligned and that no barrier cuts.

    Args:
        extent: the share.
        alignment_slots: what first slot and slot count must be multiples of, in slots of 32 channels.
        barriers: slots that no extent may have strictly inside.

    Returns:
        The extent.

    Raises:
        PrepTypeError: if an argument has the wrong type.
        PrepValueError: if the extent is misaligned or crosses a barrier; names the nearest legal extent.
    """
    if not isinstance(extent, TrellisExtent):
        raise PrepTypeError(f"extent must be a TrellisExtent, got {type(extent).__name__}")
    axis = extent.global_intermediate_size // SLOT
    check_grain(axis, alignment_slots, barriers)
    first, end = extent.first_slot, extent.first_slot + extent.slot_count
    text = f"extent of slots {first}..{end} (channels {extent.first_channel}..{extent.end_channel})"
    if first % alignment_slots or extent.slot_count % alignment_slots:
        low, high = first // alignment_slots * alignment_slots, -(-end // alignment_slots) * alignment_slots
        raise PrepValueError(
            f"{text}: first slot {first} and count {extent.slot_count} must be multiples of the alignment of "
            f"{alignment_slots} slots; nearest legal: {low}..{high}"
        )
    inside = next((barrier for barrier in sorted(barriers) if first < barrier < end), None)
    if inside is not None:
        raise PrepValueError(
            f"{text} crosses the barrier at slot {inside}; nearest legal: {first}..{inside} or {inside}..{end}"
        )
    return extent


def even_extents(intermediate_size: int, world_size: int, *, allow_empty: bool = False) -> tuple[TrellisExtent, ...]:
    """Share the axis evenly in Hadamard blocks; the first ranks take the remainder.

    Args:
        intermediate_size: channels of the (padded) axis, a multiple of 128.
        world_size: number of ranks.
        allow_empty: whether ranks beyond the number of blocks get an empty extent at the end of the axis.

    Returns:
        One extent per rank, ascending, without overlap or hole.

    Raises:
        PrepTypeError: if an argument is not an int.
        PrepValueError: if the axis is not a positive multiple of 128, or there are more ranks than blocks and none may
            be empty; names the largest world size.
    """
    blocks = count_units(intermediate_size, BLOCK_SLOTS)
    check_int("world_size", world_size)
    if world_size < 1 or (world_size > blocks and not allow_empty):
        raise PrepValueError(
            f"{world_size} ranks cannot share {intermediate_size} channels: a rank needs at least one block of "
            f"{BLOCK_SLOTS * SLOT}, so the world size must be 1 to {blocks}"
        )
    return lay_out(intermediate_size, [share * BLOCK_SLOTS for share in split_evenly(blocks, world_size)])


def rank_extent(intermediate_size: int, rank: int, world_size: int, *, allow_empty: bool = False) -> TrellisExtent:
    """One rank's extent of the even partition.

    Raises:
        PrepTypeError: if an argument is not an int.
        PrepValueError: if the rank is outside [0, world_size), or as `even_extents`.
    """
    extents = even_extents(intermediate_size, world_size, allow_empty=allow_empty)
    return extents[check_index("rank", rank, world_size)]


def split_evenly(units: int, parts: int) -> list[int]:
    """`units` in `parts` shares that differ by one at most, larger ones first."""
    share, remainder = divmod(units, parts)
    return [share + (part < remainder) for part in range(parts)]


def lay_out(intermediate_size: int, slot_counts: Sequence[int]) -> tuple[TrellisExtent, ...]:
    """Extents of the given widths in slots, one after another from slot 0."""
    extents, first = [], 0
    for count in slot_counts:
        extents.append(TrellisExtent(global_intermediate_size=intermediate_size, first_slot=first, slot_count=count))
        first += count
    return tuple(extents)


def count_units(intermediate_size: int, alignment_slots: int) -> int:
    """Units of `alignment_slots` slots on an axis.

    Raises:
        PrepTypeError: if an argument is not an int.
        PrepValueError: if the axis is not a positive multiple of a unit; names the nearest.
    """
    check_int("intermediate_size", intermediate_size)
    check_int("alignment_slots", alignment_slots)
    if alignment_slots < 1:
        raise PrepValueError(f"alignment must be at least 1 slot, got {alignment_slots}")
    unit = alignment_slots * SLOT
    if intermediate_size <= 0 or intermediate_size % unit:
        near = max(-(-intermediate_size // unit), 1) * unit
        raise PrepValueError(f"axis of {intermediate_size} channels is not a multiple of {unit}; nearest: {near}")
    return intermediate_size // unit


def check_grain(slots: int, alignment_slots: int, barriers: Sequence[int]) -> None:
    """Accept an alignment that divides the axis and barriers inside it, on the alignment.

    Raises:
        PrepTypeError: if a number is not an int.
        PrepValueError: if the alignment does not divide the axis, or a barrier is outside it, double or misaligned.
    """
    count_units(slots * SLOT, alignment_slots)
    for barrier in barriers:
        check_int("barrier", barrier)
        if not 0 < barrier < slots or barrier % alignment_slots:
            raise PrepValueError(
                f"barrier at slot {barrier} must be a multiple of the alignment of {alignment_slots} slots inside "
                f"0..{slots}"
            )
    if len(set(barriers)) != len(barriers):
        raise PrepValueError(f"barriers {list(barriers)} name a slot twice")


def check_int(name: str, value: object) -> None:
    """Accept an int that is no bool.

    Raises:
        PrepTypeError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise PrepTypeError(f"{name} must be an int, got {type(value).__name__}")


def check_index(name: str, value: int, count: int) -> int:
    """Accept an int in [0, count), and return it.

    Raises:
        PrepTypeError: if it is not an int.
        PrepValueError: if it is outside.
    """
    check_int(name, value)
    if not 0 <= value < count:
        raise PrepValueError(f"{name} {value} is outside 0..{count - 1}" if count > 0 else f"{name}: there are none")
    return value
