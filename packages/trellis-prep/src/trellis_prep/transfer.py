"""Owns the pipeline: a thread that fills slots while the caller's thread copies them out.  It must not know weights.

On any failure, in either thread, the other one stops at its next step, and the caller sees the error after both have
ended and every copy has completed; an interrupt from the keyboard is a failure like others.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_prep.errors import PrepDeviceError
from trellis_prep.lanes import CopyLane, Move
from trellis_prep.slots import Slot, SlotRing

__all__ = ["Load", "Read", "transfer"]


@dataclass(frozen=True, eq=False)
class Read:
    """A part of a slot and what fills it.

    Attributes:
        first: byte of the slot to start at.
        nbytes: bytes of the part.
        fill: writes all of them into `[nbytes] uint8`.
    """

    first: int
    nbytes: int
    fill: Callable[[npt.NDArray[np.uint8]], None]


@dataclass(frozen=True, eq=False)
class Load:
    """What passes through a slot in one turn.

    Attributes:
        name: for messages, such as "codes of experts 0..3".
        reads: what fills the slot, one after another.
        moves: where the bytes go.
    """

    name: str
    reads: tuple[Read, ...]
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read and moved."""
        return sum(read.nbytes for read in self.reads)


_Filled = tuple[Load, Slot]


def transfer(loads: Iterable[Load], ring: SlotRing, lane: CopyLane, moved: Callable[[int], None]) -> None:
    """Move loads through a ring.

    When this returns or raises, every copy that was issued has completed and the reader has ended.

    Args:
        loads: taken one by one, in the reader's thread.
        ring: slots at least as large as each load.
        lane: copies slots out.
        moved: called in this thread with the bytes of each load once its copies were issued.

    Raises:
        PrepDeviceError: if a copy fails; names the load.
        BaseException: what a read or `moved` raised.
    """
    filled: queue.SimpleQueue[_Filled | BaseException | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_fill, args=(iter(loads), ring, filled), name="trellis-prep-reader", daemon=True)
    reader.start()
    with contextlib.ExitStack() as stack:  # each step is taken whatever happens to the one before
        stack.callback(_drain, lane)
        stack.callback(reader.join)
        stack.callback(ring.cancel)
        while (item := filled.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            load, slot = item
            _copy(load, slot, ring, lane)
            moved(load.nbytes)


def _copy(load: Load, slot: Slot, ring: SlotRing, lane: CopyLane) -> None:
    try:
        lane.copy(slot, load.moves)
        copied = lane.mark()
    except RuntimeError as error:
        raise PrepDeviceError(f"{load.name}: the copy of {load.nbytes} bytes failed: {error}") from error
    ring.release(slot, copied)


def _drain(lane: CopyLane) -> None:
    try:
        lane.drain()
    except RuntimeError as error:
        raise PrepDeviceError(f"a copy failed: {error}") from error


def _fill(loads: Iterator[Load], ring: SlotRing, filled: queue.SimpleQueue[_Filled | BaseException | None]) -> None:
    try:
        for load in loads:
            slot = ring.take()
            if slot is None:
                break
            for read in load.reads:
                if ring.cancelled:
                    return
                read.fill(slot.array[read.first : read.first + read.nbytes])
            filled.put((load, slot))
    except BaseException as error:  # noqa: BLE001  # crosses to the thread that waits, which raises it
        filled.put(error)
    finally:
        filled.put(None)
