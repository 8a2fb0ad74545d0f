"""Holds the ring to lending a slot for one copy, and to waiting for that copy before anyone writes there again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from trellis_prep import PrepDeviceError, PrepStateError
from trellis_prep.slots import POISON_BYTE, SlotRing


class Copy:
    """A copy that ends when it is told to."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        assert self.done.wait(10)

    def query(self) -> bool:
        return self.done.is_set()


def test_slots_are_lent_in_turn_and_poisoned_after() -> None:
    with SlotRing(2, 8, device=None, poison=True) as ring:
        assert ring.nbytes == 16
        first = ring.take()
        view = first.array
        view[:] = np.arange(8)
        assert first.tensor.tolist() == list(range(8))
        ring.release(first, None)
        assert (view == POISON_BYTE).all()
        second = ring.take()
        assert not np.shares_memory(view, second.array)
        third = ring.take()
        assert np.shares_memory(view, third.array)


def test_slot_is_unusable_once_given_back() -> None:
    with SlotRing(1, 8, device=None) as ring:
        slot = ring.take()
        ring.release(slot, None)
        with pytest.raises(PrepStateError, match="lent for one copy"):
            _ = slot.array
        with pytest.raises(PrepStateError, match="lent for one copy"):
            _ = slot.tensor
        with pytest.raises(PrepStateError, match="given back once"):
            ring.release(slot, None)


def test_slot_is_lent_again_only_when_its_copy_has_ended() -> None:
    with SlotRing(1, 8, device=None, poison=True) as ring:
        slot, copy = ring.take(), Copy()
        view = slot.array
        view.fill(1)
        ring.release(slot, copy)
        taken = threading.Event()
        thread = threading.Thread(target=lambda: (ring.take(), taken.set()))
        thread.start()
        assert not taken.wait(0.05)
        assert (view == 1).all(), "poisoned while the copy still reads"
        copy.done.set()
        assert taken.wait(10)
        thread.join()
        assert (view == POISON_BYTE).all()


def test_a_span_is_the_address_of_bytes_that_are_lent() -> None:
    with SlotRing(2, 8, device=None) as ring:
        first, second = ring.take(), ring.take()
        assert second.span(0, 8) - first.span(3, 5) == 5
        with pytest.raises(AssertionError):
            first.span(4, 5)
        ring.release(first, None)
        with pytest.raises(PrepStateError, match="lent for one copy"):
            first.span(0, 1)


def test_cancelling_wakes_whoever_waits() -> None:
    with SlotRing(1, 8, device=None) as ring:
        ring.take()
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(ring.take()))
        thread.start()
        ring.cancel()
        thread.join(10)
        assert seen == [None]
        assert ring.take() is None


def test_a_slot_is_ready_when_its_copy_has_completed() -> None:
    with SlotRing(2, 8, device=None, poison=True) as ring:
        assert ring.ready()
        first, second = ring.take(), ring.take()
        assert not ring.ready(), "none is free"
        copy = Copy()
        ring.release(second, copy)
        assert not ring.ready(), "the one that is free is still copied"
        ring.release(first, None)
        copy.done.set()
        assert ring.ready()
        assert ring.ready()
        assert [ring.take(), ring.take()] == [second, first]
        assert not copy.waits, "its end was seen"
        assert (second.array == POISON_BYTE).all()
        ring.release(first, None)
        ring.cancel()
        assert not ring.ready()
        assert ring.take() is None


def test_closing_waits_for_every_copy() -> None:
    ring = SlotRing(2, 8, device=None)
    copies = [Copy(), Copy()]
    for copy in copies:
        ring.release(ring.take(), copy)
        copy.done.set()
    ring.close()
    assert [copy.waits for copy in copies] == [1, 1]


def test_failed_copy_is_raised_after_everything_was_freed() -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

    ring = SlotRing(2, 8, device=None)
    good = Copy()
    good.done.set()
    ring.release(ring.take(), Failed())
    ring.release(ring.take(), good)
    with pytest.raises(PrepDeviceError, match="copy out of a staging slot failed: CUDA error: an illegal"):
        ring.close()
    assert good.waits == 1
    assert ring._own.array.size == 0


def test_interrupted_wait_is_repeated_before_memory_goes() -> None:
    class Interrupted(Copy):
        def synchronize(self) -> None:
            super().synchronize()
            if self.waits == 1:
                raise KeyboardInterrupt

    ring = SlotRing(1, 8, device=None)
    slot, copy = ring.take(), Interrupted()
    copy.done.set()
    ring.release(slot, copy)
    with pytest.raises(KeyboardInterrupt):
        ring.take()
    ring.close()
    assert copy.waits == 2


@pytest.mark.gpu
def test_pinned_slot_is_poisoned_only_after_its_copy() -> None:
    device = torch.device("cuda", 0)
    targets = [torch.zeros(1 << 24, dtype=torch.uint8, device=device) for _ in range(6)]
    with SlotRing(2, 1 << 24, device=device, poison=True) as ring:
        for number, target in enumerate(targets):
            slot = ring.take()
            slot.array.fill(number + 1)
            target.copy_(slot.tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            ring.release(slot, event)
    assert [target.unique().tolist() for target in targets] == [[number + 1] for number in range(6)]
