"""Owns the byte bound of preparation: how experts are batched, and the ring of host slots they pass through.

It must not know what the bytes mean.  A slot is lent for one copy: it is taken empty, filled, copied from, and given
back; the ring waits for the copy's event before it lends the slot again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from trellis_prep.errors import PrepError, PrepTypeError, PrepValueError

__all__ = ["Batch", "StagingRing", "TrellisStaging", "plan_batches"]

MIB = 1 << 20
POISON_BYTE = 0xA5
"""What a released slot is filled with when the ring poisons, so that a late reader is seen."""


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
    """The batches of a layer and the slots they need."""

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
    batches = tuple(Batch(first, end, sum(expert_bytes[first:end])) for first, end in pairwise(cuts) if end > first)
    slots = min(slots, len(batches))
    return BatchPlan(batches, slots, max((batch.nbytes for batch in batches), default=0))


class _Slot:
    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()
        self.copied: torch.cuda.Event | None = None
        self.lent = False


class StagingRing:
    """A ring of host slots, lent in turn.

    Args:
        slots: how many.
        slot_bytes: bytes of each.
        device: where copies go; slots are pinned for a CUDA device.
        poison: whether a slot is overwritten after its release.
    """

    def __init__(self, slots: int, slot_bytes: int, *, device: torch.device, poison: bool = False) -> None:
        self._slots = [_Slot(slot_bytes, device.type == "cuda") for _ in range(slots)]
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]  # torch's own
        self._poison = poison
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.tensor.numel() for slot in self._slots)

    @contextmanager
    def lend(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Lend the next slot as `[slot_bytes] uint8`; waits until its last copy is done.

        Raises:
            PrepError: if the slot is lent already.
        """
        slot = self._slots[self._turn]
        if slot.lent:
            raise PrepError("a staging slot is lent once at a time")
        self._await(slot)
        slot.lent = True
        try:
            yield slot.array
        finally:
            slot.lent = False
            self._turn = (self._turn + 1) % len(self._slots)
            if self._stream is not None:
                slot.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
                slot.copied.record(self._stream)
            elif self._poison:
                slot.array.fill(POISON_BYTE)

    def copy(self, target: torch.Tensor, first: int) -> None:
        """Copy bytes of the slot that is lent now, from byte `first`, into `target` (`[bytes] uint8`)."""
        slot = self._slots[self._turn]
        part = slot.tensor[first : first + target.numel()]
        if self._stream is None:
            target.copy_(part)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(part, non_blocking=True)

    def drain(self) -> None:
        """Wait for every copy, and make the current stream of the device wait too."""
        for slot in self._slots:
            self._await(slot)

    def _await(self, slot: _Slot) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()
            slot.copied = None
            if self._poison:
                slot.array.fill(POISON_BYTE)
