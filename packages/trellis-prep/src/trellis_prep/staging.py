"""Owns the byte bound of preparation, and how a layer is cut to stay within it.  It must not know what bytes mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trellis_prep.errors import PrepTypeError, PrepValueError

__all__ = ["Batch", "BatchPlan", "TrellisStaging", "plan_batches", "plan_slots"]

MIB = 1 << 20
_SLOT_GRAIN = 16  # bytes of the largest element that a slot's start must suit


@dataclass(frozen=True)
class TrellisStaging:
    """Bounds of preparation.

    Args:
        max_experts: most experts in one batch.
        max_bytes: bytes that all host slots together may take, and that device temporaries may take.

    Raises:
        PrepTypeError: if a bound is not an int.
        PrepValueError: if a bound is not positive.
    """

    max_experts: int = 64
    max_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        for name in ("max_experts", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise PrepTypeError(f"staging {name} must be an int, got {type(value).__name__}")
            if value <= 0:
                raise PrepValueError(f"staging {name} must be positive, got {value}")


@dataclass(frozen=True)
class Batch:
    """Consecutive experts that pass through one slot: [first, end), and their bytes."""

    first: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a layer, and the slots they need: how many, and the bytes of each."""

    batches: tuple[Batch, ...]
    slots: int
    slot_bytes: int


def plan_batches(expert_bytes: Sequence[int], staging: TrellisStaging) -> BatchPlan:
    """Cut a layer into batches of consecutive experts.

    Two slots share the bound, so that reading overlaps copying; where one expert does not fit half the bound but fits
    the whole, there is one slot.

    Args:
        expert_bytes: bytes of each expert.
        staging: the bounds.

    Raises:
        PrepValueError: if an expert does not fit the bound ("insufficient"); names the expert, both numbers.
    """
    largest = max(expert_bytes, default=0)
    if largest > staging.max_bytes:
        raise PrepValueError(
            f"staging of {staging.max_bytes} bytes is insufficient: expert {list(expert_bytes).index(largest)} takes "
            f"{largest} bytes; give max_bytes of at least {largest} ({2 * largest} to overlap reads with copies)"
        )
    slots = 2 if largest <= staging.max_bytes // 2 else 1
    room = staging.max_bytes // slots
    cuts, size = [0], 0
    for expert, nbytes in enumerate(expert_bytes):
        if size + nbytes > room or expert - cuts[-1] == staging.max_experts:
            cuts.append(expert)
            size = 0
        size += nbytes
    cuts.append(len(expert_bytes))
    spans = [(first, end) for first, end in pairwise(cuts) if end > first]
    batches = tuple(Batch(first, end, sum(expert_bytes[first:end])) for first, end in spans)
    return BatchPlan(batches, min(slots, len(batches)), max((batch.nbytes for batch in batches), default=0))


def plan_slots(nbytes: int, staging: TrellisStaging) -> tuple[int, int]:
    """Slots for bytes that may be cut anywhere between elements.

    Args:
        nbytes: bytes to move.
        staging: the bounds.

    Returns:
        How many slots, and the bytes of each, a multiple of 16.

    Raises:
        PrepValueError: if the bound is below one element ("insufficient").
    """
    grains = staging.max_bytes // _SLOT_GRAIN
    if not grains:
        raise PrepValueError(
            f"staging of {staging.max_bytes} bytes is insufficient: tables are moved in pieces of at least "
            f"{_SLOT_GRAIN} bytes"
        )
    needed = -(-nbytes // _SLOT_GRAIN)
    slots = 2 if grains >= 2 and grains // 2 < needed else 1
    return slots, min(grains // slots, needed) * _SLOT_GRAIN
