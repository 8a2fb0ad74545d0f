"""Holds the copies out of a slot to their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trellis_prep.lanes import CpuLane, CudaLane, Move, open_lane
from trellis_prep.slots import SlotRing

CPU = torch.device("cpu")


def test_moves_write_their_targets_and_nothing_else() -> None:
    target = torch.full((10,), 0xEE, dtype=torch.uint8)
    with SlotRing(1, 8, device=None) as ring:
        slot, lane = ring.take(), open_lane(CPU)
        slot.array[:] = np.arange(8)
        lane.copy(slot, (Move(2, target[1:4]), Move(0, target[6:8])))
        assert lane.mark() is None
        lane.drain()
    assert target.tolist() == [0xEE, 2, 3, 4, 0xEE, 0xEE, 0, 1, 0xEE, 0xEE]


def test_lane_is_that_of_the_device() -> None:
    assert isinstance(open_lane(CPU), CpuLane)


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
        lane.copy(slot, (Move(0, target),))
        lane.mark().synchronize()
        torch.cuda.synchronize()
    assert (target == 5).all()
