"""Owns the plan of a preparation: every byte by its owner, and the staging, before anything moves or is allocated.

It must not know weights or devices: a source and bounds are enough.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource
from trellis_prep.errors import PrepTypeError
from trellis_prep.layout import PreparedLayout, plan_layout
from trellis_prep.staging import SLOTS_PER_READER, Batch, TrellisStaging, plan_batches, plan_slots

__all__ = ["LONG_RUN", "MOST_READERS", "PreparationPlan", "plan_preparation"]

MOST_READERS = 4
"""Threads that fill slots, where there are as many cores.  On an H200's host four threads fill 64 MiB of slots at 16 to
20 GB/s from the page cache and eight at 12 to 14: from there they wait for the interpreter's lock."""
LEAST_SLOT = 4 << 20
"""Bytes of a slot below which there are fewer readers instead: what surrounds a slot's copy would cost more than it."""
LONG_RUN = 16 << 10
"""Bytes of a contiguous run of a file from which on readers help each other: below, the interpreter's lock is what they
wait for, and each wait costs more than the read."""


@dataclass(frozen=True, eq=False)
class PreparationPlan:
    """What a preparation will take.

    Attributes:
        layout: the share, and its bytes.
        staging: the bounds.
        batches: consecutive experts, or a part of one, whose codes pass through one slot.
        slots: host slots.
        slot_bytes: bytes of each.
        readers: threads that fill slots.
    """

    layout: PreparedLayout
    staging: TrellisStaging
    batches: tuple[Batch, ...]
    slots: int
    slot_bytes: int
    readers: int

    @property
    def host_bytes(self) -> int:
        """Bytes of the host ring; at most the bound."""
        return self.slots * self.slot_bytes

    @property
    def device_temporary_bytes(self) -> int:
        """Device bytes beyond the prepared tensors: none, since stored tile order is the prepared one."""
        return 0

    @property
    def owners(self) -> dict[str, int]:
        """Bytes of codes and of each table, by name; their sum is `layout.total_bytes`."""
        return {tensor.name: tensor.nbytes for tensor in self.layout.tensors}


def plan_preparation(
    source: TrellisSource, *, extent: TrellisExtent | None = None, staging: TrellisStaging | None = None
) -> PreparationPlan:
    """Plan the preparation of a rank's share.

    Args:
        source: the layer.
        extent: the share of the intermediate axis (default: all that the source covers).
        staging: bounds (default: 64 experts and 64 MiB).

    Raises:
        PrepTypeError: if an argument has the wrong type.
        PrepValueError: if the extent does not fit, or an expert exceeds the bound ("insufficient"); names both numbers.
        FormatValueError: if the extent cuts a Hadamard block.
    """
    bounds = TrellisStaging() if staging is None else staging
    if not isinstance(bounds, TrellisStaging):
        raise PrepTypeError(f"staging must be a TrellisStaging, got {type(bounds).__name__}")
    layout = plan_layout(source, extent)
    if not layout.code_words:
        return PreparationPlan(layout, bounds, (), *plan_slots(layout.total_bytes, bounds), readers=1)
    readers = _readers(bounds, layout.run_bytes())
    rows = [layout.rows(index) for index in range(len(source.geometry.projections))]
    codes = plan_batches(rows, layout.row_bytes.tolist(), bounds, readers=readers)
    readers = min(readers, codes.slots)
    return PreparationPlan(layout, bounds, codes.batches, codes.slots, codes.slot_bytes, readers)


def _readers(staging: TrellisStaging, run_bytes: int) -> int:
    if staging.readers is not None:
        return staging.readers
    if run_bytes < LONG_RUN:
        return 1
    room = staging.max_bytes // (SLOTS_PER_READER * LEAST_SLOT)
    return max(min(len(os.sched_getaffinity(0)), MOST_READERS, room), 1)
