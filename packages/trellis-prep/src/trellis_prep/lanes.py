"""Owns the copy of a filled slot to where its bytes belong, on a CPU or a GPU.  It must not know what they mean."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trellis_prep.slots import Completion, Slot

__all__ = ["CopyLane", "CpuLane", "CudaLane", "Move", "open_lane"]


@dataclass(frozen=True, eq=False)
class Move:
    """A copy out of a slot.

    Attributes:
        first: byte of the slot to start from.
        target: `[bytes] uint8`, contiguous, where they go.
    """

    first: int
    target: torch.Tensor


class CopyLane(Protocol):
    """A way to a device; several threads may use it at a time."""

    def issuing(self) -> contextlib.AbstractContextManager[object]:
        """What a thread enters once before it issues copies."""

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        """Issue copies out of a slot that is lent."""

    def mark(self) -> Completion | None:
        """The end of everything that was issued so far; None when it has completed."""

    def drain(self) -> None:
        """Wait for everything that was issued."""


class CpuLane:
    """Copies that have completed when they return.

    They are numpy's, on the thread that filled the slot: torch would share each one out over its pool of threads, which
    competes with the readers (0.2 instead of 1.5 GB/s on two busy cores).
    """

    def issuing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        for move in moves:
            np.copyto(move.target.numpy(), slot.array[move.first : move.first + move.target.numel()])

    def mark(self) -> None:
        return None

    def drain(self) -> None:
        return None


class CudaLane:
    """Copies on a stream of their own, so that reading goes on meanwhile.

    The stream first waits for the device's current one: the allocator may have given out memory that kernels queued
    there still use.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def issuing(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        """Issue copies, in a thread that has entered `issuing`."""
        for move in moves:
            part = slot.tensor[move.first : move.first + move.target.numel()]
            move.target.copy_(part, non_blocking=True)

    def mark(self) -> Completion:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return event

    def drain(self) -> None:
        self._stream.synchronize()


def open_lane(device: torch.device) -> CopyLane:
    """The lane to a device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
