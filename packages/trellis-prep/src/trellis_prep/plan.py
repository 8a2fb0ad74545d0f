"""Owns the plan of a preparation: every byte by its owner, and the staging, before anything moves or is allocated.

It must not know weights or devices: a source and bounds are enough.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from trellis_format.extent import TrellisExtent
from trellis_format.files.pollers import have_pollers, have_workers
from trellis_format.files.uring import LONG_BYTES, have_ring
from trellis_format.source import TrellisSource
from trellis_prep.errors import PrepTypeError
from trellis_prep.layout import PreparedLayout, plan_layout
from trellis_prep.staging import SLOTS_PER_READER, Batch, TrellisStaging, plan_batches, plan_slots

__all__ = ["LONG_RUN", "MOST_COPIERS", "MOST_READERS", "PreparationPlan", "plan_preparation"]

MOST_READERS = 4
"""Threads that fill slots with long runs, where there are as many cores: each one's reads keep many of the kernel's
workers busy, so more of them only wait for the interpreter's lock."""
MOST_COPIERS = 16
"""Threads that fill slots with short runs, which each thread copies itself, outside the interpreter's lock."""
LEAST_SLOT = 4 << 20
"""Bytes of a slot of long runs below which there are fewer readers instead: what surrounds a slot's copy would cost
more than it."""
LEAST_SHORT_SLOT = 1 << 20
"""The same of short runs, which take longer."""
MOST_POLLERS = 8
"""Threads of the kernel that fill slots with short runs, on half of the cores: more take more from the thread that
feeds them than they bring."""
LEAST_CORES = 4
"""Cores below which the kernel's threads would be in this process's way."""
LEAST_POLLED = 32 << 20
"""Bytes of codes below which starting such threads takes longer than they save."""
MOST_POLLED_SLOTS = 8
"""Slots that the kernel fills: some are read into, some are copied out of."""
LEAST_POLLED_SLOT = 3 << 20
"""Bytes of one, unless there would be fewer than two."""
LONG_RUN = LONG_BYTES
"""Bytes of a contiguous run of a file from which on the kernel's workers copy it."""


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
        pollers: threads of the kernel that fill slots in their place, where codes lie in files in short runs.
        workers: whether the kernel's own pool does, where they lie in long runs.
    """

    layout: PreparedLayout
    staging: TrellisStaging
    batches: tuple[Batch, ...]
    slots: int
    slot_bytes: int
    readers: int
    pollers: int = 0
    workers: bool = False

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
    pollers, workers = _kernel(bounds, layout)
    if pollers or workers:
        slots = max(min(bounds.max_bytes // LEAST_POLLED_SLOT, MOST_POLLED_SLOTS), SLOTS_PER_READER)
        readers = max(slots // SLOTS_PER_READER, 1)
    else:
        slots, readers = None, _readers(bounds, layout.run_bytes())
    rows = [layout.rows(index) for index in range(len(source.geometry.projections))]
    codes = plan_batches(rows, layout.row_bytes.tolist(), bounds, readers=readers, slots=slots)
    readers = min(readers, codes.slots)
    return PreparationPlan(layout, bounds, codes.batches, codes.slots, codes.slot_bytes, readers, pollers, workers)


def _kernel(staging: TrellisStaging, layout: PreparedLayout) -> tuple[int, bool]:
    """Pollers, and whether the kernel's workers fill slots."""
    cores = len(os.sched_getaffinity(0))
    if staging.readers is not None or cores < LEAST_CORES or layout.code_bytes < LEAST_POLLED:
        return 0, False
    if layout.run_bytes() >= LONG_RUN:
        return 0, have_workers()
    return (min(cores // 2, MOST_POLLERS), False) if have_pollers() else (0, False)


def _readers(staging: TrellisStaging, run_bytes: int) -> int:
    if staging.readers is not None:
        return staging.readers
    short = run_bytes < LONG_RUN
    if short and not have_ring():  # a system call for each run: threads would wait for the interpreter's lock
        return 1
    most, slot = (MOST_COPIERS, LEAST_SHORT_SLOT) if short else (MOST_READERS, LEAST_SLOT)
    return max(min(len(os.sched_getaffinity(0)), most, staging.max_bytes // (SLOTS_PER_READER * slot)), 1)
