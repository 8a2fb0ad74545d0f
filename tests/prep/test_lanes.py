"""Holds the copies out of a slot to their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trellis_prep.driver import DriverStream
from trellis_prep.lanes import CpuLane, CudaLane, Move, open_lane
from trellis_prep.slots import SlotRing

CPU = torch.device("cpu")


def test_moves_write_their_targets_and_nothing_else() -> None:
    target = torch.full((10,), 0xEE, dtype=torch.uint8)
    with SlotRing(1, 8, device=None) as ring:
        slot, lane = ring.take(), open_lane(CPU)
        slot.array[:] = np.arange(8)
        lane.copy(slot, (Move(2, target, 1, 3), Move(0, target, 6, 2)))
        assert lane.mark(slot) is None
        lane.drain()
    assert target.tolist() == [0xEE, 2, 3, 4, 0xEE, 0xEE, 0, 1, 0xEE, 0xEE]


def test_a_move_tells_its_part() -> None:
    target = torch.arange(10)
    assert Move(0, target, 3, 4).part.tolist() == [3, 4, 5, 6]


def test_lane_is_that_of_the_device() -> None:
    assert isinstance(open_lane(CPU), CpuLane)


@pytest.mark.gpu
@pytest.mark.parametrize("through_driver", [True, False])
def test_gpu_copies_go_to_their_parts(through_driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not through_driver:
        monkeypatch.setattr(DriverStream, "of", lambda _: None)
    device, targets = torch.device("cuda", 0), []
    with SlotRing(1, 1000, device=device, poison=True) as ring:
        lane = open_lane(device)
        assert isinstance(lane, CudaLane)
        ends = set()
        with lane.issuing():
            for number in range(3):
                targets.append(torch.zeros(900, dtype=torch.uint8, device=device))
                torch.cuda.synchronize()
                slot = ring.take()
                slot.array[:] = np.arange(1000) % 251 + number
                lane.copy(slot, (Move(7, targets[-1], 3, 501), Move(600, targets[-1], 801, 99)))
                ends.add(lane.mark(slot))
                ring.release(slot, lane.mark(slot))
        lane.drain()
        assert len(ends) == 1, "a slot's mark is used again"
    for number, target in enumerate(targets):
        expected = np.zeros(900, dtype=np.uint8)
        expected[3:504], expected[801:] = np.arange(7, 508) % 251 + number, np.arange(600, 699) % 251 + number
        assert np.array_equal(target.cpu().numpy(), expected)


@pytest.mark.gpu
def test_gpu_copies_come_after_what_was_queued_before() -> None:
    device = torch.device("cuda", 0)
    assert isinstance(open_lane(device), CudaLane)
    target = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    with SlotRing(1, 1 << 20, device=device) as ring:
        slot = ring.take()
        slot.array.fill(5)
        torch.cuda._sleep(200_000_000)
        target.fill_(1)  # queued, not yet done
        lane = CudaLane(device)
        lane.copy(slot, (Move(0, target, 0, 1 << 20),))
        lane.mark(slot).synchronize()
        torch.cuda.synchronize()
    assert (target == 5).all()
