"""Owns which shares of the intermediate axis a container may be cut into.  It must not know why, nor ranks."""

from __future__ import annotations

import itertools
import math

from trellis_format.container.manifest import PAIR_SLOTS, ManifestHead
from trellis_format.errors import FormatValueError
from trellis_format.extent import SLOT, TrellisExtent

__all__ = ["check_extent", "extent_alignment", "nearest_extents", "whole_extent"]


def whole_extent(head: ManifestHead) -> TrellisExtent:
    """The extent of all slots, which barriers may make illegal."""
    return TrellisExtent.whole(head.geometry.intermediate_size)


def extent_alignment(head: ManifestHead) -> int:
    """Slots that both ends of an extent are a multiple of: what the layout says, whole pairs, and whole blocks."""
    pair = PAIR_SLOTS if head.rates.pairs else 1
    block = head.hadamard.post_block or SLOT
    return math.lcm(head.layout.extent_alignment_slots, pair, block // SLOT)


def nearest_extents(head: ManifestHead, extent: TrellisExtent) -> list[tuple[int, int]]:
    """The legal extents that together cover an extent, as (first slot, end slot)."""
    grain = extent_alignment(head)
    first = extent.first_slot // grain * grain
    end = min(-(-(extent.first_slot + max(extent.slot_count, 1)) // grain) * grain, head.geometry.num_slots)
    cuts = [first, *(barrier for barrier in sorted(head.layout.extent_barriers) if first < barrier < end), end]
    return list(itertools.pairwise(cuts))


def check_extent(head: ManifestHead, extent: TrellisExtent, *, barriers: bool = True) -> None:
    """Accept an extent that a container may be cut to.

    Args:
        head: the manifest.
        extent: the share.
        barriers: whether they count; not to one who carries a layer and computes nothing.

    Raises:
        FormatValueError: if it is empty, of another axis, not aligned, or reaches across a barrier; names first slot,
            count, the rule, and the nearest legal extents.
    """
    first, count = extent.first_slot, extent.slot_count
    if extent.global_intermediate_size != head.geometry.intermediate_size:
        raise FormatValueError(
            f"extent is of an axis of {extent.global_intermediate_size} channels, the container of one of "
            f"{head.geometry.intermediate_size}"
        )
    grain = extent_alignment(head)
    every = sorted(head.layout.extent_barriers) if barriers else ()
    crossed = [barrier for barrier in every if first < barrier < first + count]
    if count == 0:
        rule = "it is empty"
    elif first % grain or count % grain:
        rule = f"both must be multiples of the alignment of {grain} slots"
    elif crossed:
        rule = f"the barrier at slot {crossed[0]} lies inside"
    else:
        return
    near = ", ".join(f"first {low} count {high - low}" for low, high in nearest_extents(head, extent))
    raise FormatValueError(f"extent of first slot {first}, count {count}: {rule}; nearest legal: {near}")
