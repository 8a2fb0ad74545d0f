"""Owns the ring of host slots that bytes pass through.  It must not know what they mean or where they go.

A slot is lent for one copy.  A thread takes it, fills it, issues the copy and gives it back with the event that marks
the copy's end; whoever takes it next waits for that event first.
"""

from __future__ import annotations

import contextlib
import queue
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trellis_prep.errors import PrepDeviceError, PrepStateError
from trellis_prep.pinned import HostBuffer

__all__ = ["POISON_BYTE", "Completion", "Slot", "SlotRing"]

POISON_BYTE = 0xA5
"""What a released slot is filled with when the ring poisons, so that a late reader is seen."""


class Completion(Protocol):
    """The end of a copy, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait for it."""

    def query(self) -> bool:
        """Whether it has come."""


class Slot:
    """Bytes of the ring, usable while lent."""

    def __init__(self, array: npt.NDArray[np.uint8], tensor: torch.Tensor) -> None:
        self._array, self._tensor = array, tensor
        self.address = array.ctypes.data
        self.lent = False
        self.copied: Completion | None = None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """`[slot_bytes] uint8`.

        Raises:
            PrepStateError: if the slot is not lent.
        """
        self._check_lent()
        return self._array

    @property
    def tensor(self) -> torch.Tensor:
        """`[slot_bytes] uint8`, the same memory.

        Raises:
            PrepStateError: if the slot is not lent.
        """
        self._check_lent()
        return self._tensor

    def span(self, first: int, nbytes: int) -> int:
        """The address of bytes [first, first + nbytes).

        Raises:
            PrepStateError: if the slot is not lent.
        """
        self._check_lent()
        assert first + nbytes <= self._array.size
        return self.address + first

    def settle(self, *, poison: bool) -> None:
        """Wait for the copy from this slot, then overwrite it where asked.

        Raises:
            PrepDeviceError: if the copy failed.
        """
        if self.copied is not None:
            try:
                self.copied.synchronize()
            except RuntimeError as error:
                raise PrepDeviceError(f"a copy out of a staging slot failed: {error}") from error
            self.copied = None  # only now: an interrupted wait must be repeated
        if poison:
            self._array.fill(POISON_BYTE)

    def forget(self) -> None:
        """Let go of the memory."""
        self._array, self._tensor = np.empty(0, dtype=np.uint8), torch.empty(0, dtype=torch.uint8)

    def _check_lent(self) -> None:
        if not self.lent:
            raise PrepStateError("a staging slot is lent for one copy; this one was given back")


class SlotRing:
    """Host slots, lent in turn.  Use it as a context: leaving waits for every copy and frees the memory.

    Any thread takes slots and releases those that it took.

    Attributes:
        slot_bytes: bytes of a slot.
        nbytes: bytes of all slots.

    Args:
        slots: how many.
        slot_bytes: bytes of each.
        device: CUDA device that copies go to, for which slots are page-locked; None for a CPU.
        poison: whether a slot is overwritten once its copy has completed.
        buffer: memory of at least `slots * slot_bytes` bytes to use, which stays the caller's; None takes its own.

    Raises:
        PrepMemoryError: if the memory cannot be had.
    """

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        *,
        device: torch.device | None,
        poison: bool = False,
        buffer: HostBuffer | None = None,
    ) -> None:
        self.slot_bytes, self.nbytes = slot_bytes, slots * slot_bytes
        self._poison = poison
        self._cancelled = False
        self._own = HostBuffer(self.nbytes, device=device) if buffer is None else None
        memory = self._own if buffer is None else buffer
        assert memory is not None
        spans = [slice(index * slot_bytes, (index + 1) * slot_bytes) for index in range(slots)]
        self._slots = [Slot(memory.array[span], memory.tensor[span]) for span in spans]
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._first: Slot | None = None  # of those that are free, where someone looked whether its copy has completed
        for slot in self._slots:
            self._free.put(slot)

    def __enter__(self) -> SlotRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def cancelled(self) -> bool:
        """Whether no more slots are lent."""
        return self._cancelled

    def take(self) -> Slot | None:
        """Borrow the next slot, once it is free and its last copy has completed; None when the ring was cancelled."""
        slot = None if self._cancelled else self._first or self._free.get()
        self._first = None
        if slot is None or self._cancelled:
            self._free.put(None)  # for whoever else waits
            return None
        slot.settle(poison=self._poison)
        slot.lent = True
        return slot

    def ready(self) -> bool:
        """Whether `take` would give a slot without waiting; for a thread that alone takes slots.

        Raises:
            PrepDeviceError: if a copy failed.
        """
        first = self._first
        if first is None:
            if self._cancelled or self._free.empty():  # which is cheap to ask
                return False
            try:
                first = self._first = self._free.get_nowait()
            except queue.Empty:
                return False
            if first is None:
                return False
        if first.copied is None:
            return True
        try:
            if not first.copied.query():
                return False
        except RuntimeError as error:
            raise PrepDeviceError(f"a copy out of a staging slot failed: {error}") from error
        first.copied = None  # so that it is not waited for again
        return True

    def release(self, slot: Slot, copied: Completion | None) -> None:
        """Give a slot back.

        Args:
            slot: one that is lent.
            copied: the end of the copy from it, or None if that has completed.

        Raises:
            PrepStateError: if the slot is not lent.
        """
        if not slot.lent:
            raise PrepStateError("a staging slot is given back once")
        slot.lent, slot.copied = False, copied
        if copied is None:
            slot.settle(poison=self._poison)
        self._free.put(slot)

    def cancel(self) -> None:
        """Lend no more, and wake whoever waits for a slot."""
        self._cancelled = True
        self._free.put(None)

    def close(self) -> None:
        """Wait for every copy and free the memory, also when a copy failed.

        Raises:
            PrepDeviceError: if a copy failed.
        """
        self.cancel()
        with contextlib.ExitStack() as stack:
            if self._own is not None:
                stack.callback(self._own.close)
            for slot in self._slots:
                stack.callback(slot.forget)
                stack.callback(slot.settle, poison=self._poison)
