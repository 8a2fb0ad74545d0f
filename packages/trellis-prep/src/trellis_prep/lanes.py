"""Owns the copy of a filled slot to where its bytes belong, on a CPU or a GPU.  It must not know what they mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trellis_prep.driver import DriverStream
from trellis_prep.slots import Completion, Slot

__all__ = ["CopyLane", "CpuLane", "CudaLane", "Move", "open_lane"]


class Move(NamedTuple):
    """A copy out of a slot, in numbers: to cut a tensor takes longer than to issue the copy.

    Attributes:
        first: byte of the slot to start from.
        target: `[bytes] uint8`, contiguous, that the bytes go to a part of.
        begin: first byte of the part.
        nbytes: bytes of the part.
    """

    first: int
    target: torch.Tensor
    begin: int
    nbytes: int

    @property
    def part(self) -> torch.Tensor:
        """`[nbytes] uint8`, where the bytes go."""
        return self.target[self.begin : self.begin + self.nbytes]


class CopyLane(Protocol):
    """A way to a device; several threads may use it at a time."""

    def issuing(self) -> contextlib.AbstractContextManager[object]:
        """What a thread enters once before it issues copies."""

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        """Issue copies out of a slot that is lent."""

    def mark(self, slot: Slot) -> Completion | None:
        """The end of everything that was issued so far, for a slot that is lent; None when it has completed."""

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
            end = move.begin + move.nbytes
            np.copyto(move.target.numpy()[move.begin : end], slot.array[move.first : move.first + move.nbytes])

    def mark(self, slot: Slot) -> None:  # noqa: ARG002  # the protocol's
        return None

    def drain(self) -> None:
        return None


class CudaLane:
    """Copies on a stream of their own, so that reading goes on meanwhile.

    The stream first waits for the device's current one: the allocator may have given out memory that kernels queued
    there still use.  Copies are issued through CUDA's driver where that is found: torch takes several times as long for
    each, which a small bound, and so many copies, shows.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._driver = DriverStream.of(self._stream.cuda_stream)
        # used again, each when the slot's former copy has been waited for
        self._marks: dict[Slot, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def issuing(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if self._driver is not None:
                self._driver.enter()
            yield

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        """Issue copies, in a thread that has entered `issuing`."""
        for move in moves:
            if self._driver is None:
                move.part.copy_(slot.tensor[move.first : move.first + move.nbytes], non_blocking=True)
                continue
            assert move.begin + move.nbytes <= move.target.numel()  # the layout's arithmetic
            address = slot.span(move.first, move.nbytes)
            self._driver.copy(move.target.data_ptr() + move.begin, address, move.nbytes)

    def mark(self, slot: Slot) -> Completion:
        event = self._marks.get(slot)
        if event is None:
            event = self._marks[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return event

    def drain(self) -> None:
        self._stream.synchronize()


def open_lane(device: torch.device) -> CopyLane:
    """The lane to a device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
