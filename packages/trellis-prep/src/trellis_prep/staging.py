"""Owns the byte bound of preparation, and how a layer is cut to stay within it.  It must not know what bytes mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trellis_prep.errors import PrepTypeError, PrepValueError

__all__ = ["SLOTS_PER_READER", "Batch", "BatchPlan", "TrellisStaging", "plan_batches", "plan_slots"]

MIB = 1 << 20
SLOTS_PER_READER = 2
"""Slots for each thread that fills them: it fills one while the other is copied."""
LARGE_LINEAR = 1 << 20
"""Bytes of a linear from which on a batch may be of one projection."""
LEAST_SLOTS = 4
"""Slots that must hold the largest linear each for that."""
MANY_SLOTS = 6
"""Slots below which a batch is not made of more linears: some are read into, some are copied out of."""
_SLOT_GRAIN = 16  # bytes of the largest element that a slot's start must suit


@dataclass(frozen=True)
class TrellisStaging:
    """Bounds of preparation.

    Args:
        max_experts: most experts in one batch.
        max_bytes: bytes that all host slots together may take, and that device temporaries may take.
        readers: threads that fill slots; None chooses by cores and by how long the runs of files are.

    Raises:
        PrepTypeError: if a bound is not an int.
        PrepValueError: if a bound is not positive.
    """

    max_experts: int = 64
    max_bytes: int = 64 * MIB
    readers: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_experts", "max_bytes", "readers"):
            value = getattr(self, name)
            if name == "readers" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise PrepTypeError(f"staging {name} must be an int, got {type(value).__name__}")
            if value <= 0:
                raise PrepValueError(f"staging {name} must be positive, got {value}")


class Batch(NamedTuple):
    """What passes through one slot: consecutive experts, whole or one projection of them, or a part of one expert.

    Attributes:
        first: first expert.
        end: expert past the last.
        nbytes: bytes of the codes.
        parts: the rows of tiles [first, end) of each projection; None for whole experts.
    """

    first: int
    end: int
    nbytes: int
    parts: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a layer, and the slots they need: how many, and the bytes of each."""

    batches: tuple[Batch, ...]
    slots: int
    slot_bytes: int


def plan_batches(
    rows: Sequence[int],
    row_bytes: Sequence[Sequence[int]],
    staging: TrellisStaging,
    *,
    readers: int = 1,
    slots: int | None = None,
) -> BatchPlan:
    """Cut a layer into batches of consecutive experts, and experts larger than a slot into parts of even size.

    `SLOTS_PER_READER` slots for each reader share the bound; fewer where a row of tiles would not fit, or where that
    lets a slot hold a whole expert and leaves more slots than readers.

    Args:
        rows: rows of tiles of each projection.
        row_bytes: `[experts][projections]`, bytes of a row.
        staging: the bounds.
        readers: threads that fill slots.
        slots: most slots (default: `SLOTS_PER_READER` for each reader); where linears are large, a batch is then of one
            projection, so that it takes one copy.

    Raises:
        PrepValueError: if an expert does not fit the bound ("insufficient"); names the expert, both numbers.
    """
    linear_bytes = np.asarray(row_bytes, dtype=np.int64).reshape(-1, len(rows)) * np.array(rows, dtype=np.int64)
    expert_bytes: list[int] = linear_bytes.sum(axis=1).tolist()
    largest = max(expert_bytes, default=0)
    if largest > staging.max_bytes:
        raise PrepValueError(
            f"staging of {staging.max_bytes} bytes is insufficient: expert {expert_bytes.index(largest)} takes "
            f"{largest} bytes; give max_bytes of at least {largest} ({2 * largest} for two slots that hold one each)"
        )
    if slots is not None and (plan := _plan_projections(rows, linear_bytes, staging, slots)) is not None:
        return plan
    longest = max((max(sizes) for sizes in row_bytes), default=0)
    most = SLOTS_PER_READER * readers if slots is None else slots
    slots = max(min(most, staging.max_bytes // max(longest, 1)), 1)
    if (whole := staging.max_bytes // max(largest, 1)) > readers:
        slots = min(slots, whole)  # a few slots fewer, that hold a whole expert each
    room = staging.max_bytes // slots
    batches: list[Batch] = []
    cuts: dict[tuple[int, ...], list[tuple[tuple[int, int], ...]]] = {}
    first, size = 0, 0
    for expert, nbytes in enumerate(expert_bytes):
        if expert > first and (size + nbytes > room or expert - first == staging.max_experts):
            batches.append(Batch(first, expert, size))
            first, size = expert, 0
        size += nbytes
        if size > room:
            sizes = tuple(row_bytes[expert])  # those of most experts are the same
            if sizes not in cuts:
                cuts[sizes] = _cut(rows, sizes, room)
            batches += [_part(expert, parts, sizes) for parts in cuts[sizes]]
            first, size = expert + 1, 0
    if size:
        batches.append(Batch(first, len(expert_bytes), size))
    most = max((batch.nbytes for batch in batches), default=0)
    return BatchPlan(tuple(batches), min(slots, len(batches)), most)


def _plan_projections(
    rows: Sequence[int], linear_bytes: npt.NDArray[np.int64], staging: TrellisStaging, slots: int
) -> BatchPlan | None:
    """Batches of linears of one projection, neighbours in the layout; None where linears are small or few fit."""
    largest = int(np.max(linear_bytes, initial=0))
    if largest < LARGE_LINEAR or staging.max_bytes < LEAST_SLOTS * largest:
        return None
    room = max(staging.max_bytes // (MANY_SLOTS * largest), 1) * largest
    batches: list[Batch] = []
    for index in range(len(rows)):
        parts = tuple((0, count if place == index else 0) for place, count in enumerate(rows))
        first = size = 0
        for expert, nbytes in enumerate(linear_bytes[:, index].tolist()):
            if expert > first and (size + nbytes > room or expert - first == staging.max_experts):
                batches.append(Batch(first, expert, size, parts))
                first, size = expert, 0
            size += nbytes
        batches.append(Batch(first, len(linear_bytes), size, parts))
    most = max(batch.nbytes for batch in batches)
    return BatchPlan(tuple(batches), min(slots, staging.max_bytes // most, len(batches)), most)


def _cut(rows: Sequence[int], sizes: Sequence[int], room: int) -> list[tuple[tuple[int, int], ...]]:
    """Parts of an expert, as the rows [first, end) of each projection, each at most `room` bytes and about even."""
    total = sum(count * size for count, size in zip(rows, sizes, strict=True))
    pieces = -(-total // room)
    even = -(-total // pieces)
    if max(sizes) <= even and len(parts := list(_cut_at(rows, sizes, even))) == pieces:
        return parts  # where rows end at the right places, as between projections of one size
    return list(_cut_at(rows, sizes, min(even + max(sizes), room)))  # a part ends between rows: none may be left over


def _cut_at(rows: Sequence[int], sizes: Sequence[int], goal: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Parts of at most `goal` bytes, which is at least a row."""
    left = sum(count * size for count, size in zip(rows, sizes, strict=True))
    done = [0] * len(rows)
    while left:
        free, part = goal, []
        for index, (count, size) in enumerate(zip(rows, sizes, strict=True)):
            taken = min(count - done[index], free // size)
            part.append((done[index], done[index] + taken))
            done[index] += taken
            free -= taken * size
            if done[index] < count:
                part += [(done[later], done[later]) for later in range(index + 1, len(rows))]
                break
        yield tuple(part)
        left -= goal - free


def _part(expert: int, parts: tuple[tuple[int, int], ...], sizes: Sequence[int]) -> Batch:
    nbytes = sum((end - first) * size for (first, end), size in zip(parts, sizes, strict=True))
    return Batch(expert, expert + 1, nbytes, parts)


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
    most = min(SLOTS_PER_READER, grains)
    size = min(grains // most, needed)
    return min(most, -(-needed // size)), size * _SLOT_GRAIN
