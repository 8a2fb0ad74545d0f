"""Holds the pipeline to reading ahead, to order, and to stopping both threads on any failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trellis_prep import PrepDeviceError
from trellis_prep.lanes import CpuLane, Move
from trellis_prep.slots import Slot, SlotRing
from trellis_prep.transfer import Load, Read, transfer


def make_loads(target: torch.Tensor, count: int, size: int, log: list[Any] | None = None) -> Iterator[Load]:
    """Loads of two reads each; load i fills its part of the target with i + 1."""
    for number in range(count):

        def fill(out: np.ndarray[Any, Any], number: int = number) -> None:
            out.fill(number + 1)
            if log is not None:
                log.append(("read", number))

        half = size // 2
        reads = (Read(0, half, fill), Read(half, size - half, fill))
        yield Load(f"load {number}", reads, (Move(0, target[number * size : (number + 1) * size]),))


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_load_arrives(slots: int, count: int) -> None:
    target = torch.full((count * 10,), 0xEE, dtype=torch.uint8)
    moved: list[int] = []
    with SlotRing(slots, 10, device=None, poison=True) as ring:
        transfer(make_loads(target, count, 10), ring, CpuLane(), moved.append)
    assert target.tolist() == [number + 1 for number in range(count) for _ in range(10)]
    assert moved == [10] * count


class GatedLane(CpuLane):
    """A lane whose copies wait at a gate."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Semaphore(0), threading.Event()

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        self.reached.set()
        assert self.gate.acquire(timeout=10)
        super().copy(slot, moves)


@pytest.mark.parametrize(("slots", "ahead"), [(1, 1), (2, 2), (3, 3)])
def test_reader_is_ahead_of_the_copy_by_the_slots_and_no_more(slots: int, ahead: int) -> None:
    target = torch.zeros(50, dtype=torch.uint8)
    log: list[Any] = []
    lane = GatedLane()
    with SlotRing(slots, 10, device=None) as ring:
        thread = threading.Thread(
            target=lambda: transfer(make_loads(target, 5, 10, log), ring, lane, lambda _: None), daemon=True
        )
        thread.start()
        assert lane.reached.wait(10)
        deadline = threading.Event()
        while len(log) < 2 * ahead:
            deadline.wait(0.001)
        deadline.wait(0.05)
        assert len(log) == 2 * ahead, "a slot was filled again before its copy"
        for _ in range(5):
            lane.gate.release()
        thread.join(10)
    assert target.tolist() == [number + 1 for number in range(5) for _ in range(10)]


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trellis-prep-reader"]


@pytest.mark.parametrize("error", [ValueError("bad bytes"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("where", [0, 3])
def test_failed_read_is_raised_after_the_loads_before_it(error: BaseException, where: int) -> None:
    target = torch.zeros(50, dtype=torch.uint8)
    moved: list[int] = []

    def loads() -> Iterator[Load]:
        for number, load in enumerate(make_loads(target, 5, 10)):
            yield load if number != where else Load("bad", (Read(0, 1, fail),), ())

    def fail(_: object) -> None:
        raise error

    with SlotRing(2, 10, device=None) as ring, pytest.raises(type(error)) as caught:
        transfer(loads(), ring, CpuLane(), moved.append)
    assert caught.value is error
    assert moved == [10] * where
    assert reader_threads() == []


def test_failed_plan_of_a_load_is_raised() -> None:
    def loads() -> Iterator[Load]:
        raise KeyError("no such tensor")
        yield

    with SlotRing(1, 10, device=None) as ring, pytest.raises(KeyError, match="no such tensor"):
        transfer(loads(), ring, CpuLane(), lambda _: None)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("from the caller")])
def test_failure_in_the_callers_thread_stops_the_reader(error: BaseException) -> None:
    target = torch.zeros(10_000, dtype=torch.uint8)
    log: list[Any] = []

    def moved(_: int) -> None:
        raise error

    with SlotRing(2, 10, device=None) as ring, pytest.raises(type(error)) as caught:
        transfer(make_loads(target, 1000, 10, log), ring, CpuLane(), moved)
    assert caught.value is error
    assert len(log) <= 2 * 3
    assert reader_threads() == []


def test_failed_copy_names_its_load() -> None:
    class Broken(CpuLane):
        def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
            raise RuntimeError("CUDA error: out of luck")

    target = torch.zeros(50, dtype=torch.uint8)
    with (
        SlotRing(2, 10, device=None) as ring,
        pytest.raises(PrepDeviceError, match="load 0: the copy of 10 bytes failed: CUDA error: out of luck"),
    ):
        transfer(make_loads(target, 5, 10), ring, Broken(), lambda _: None)
    assert reader_threads() == []


def test_lane_is_drained_whatever_happens() -> None:
    class Counting(CpuLane):
        drains = 0

        def drain(self) -> None:
            self.drains += 1

    target = torch.zeros(20, dtype=torch.uint8)
    for moved in ([].append, lambda _: 1 / 0):
        lane = Counting()
        with SlotRing(2, 10, device=None) as ring, contextlib.suppress(ZeroDivisionError):
            transfer(make_loads(target, 2, 10), ring, lane, moved)
        assert lane.drains == 1


def test_failed_drain_is_a_device_error() -> None:
    class Broken(CpuLane):
        def drain(self) -> None:
            raise RuntimeError("CUDA error: late")

    target = torch.zeros(20, dtype=torch.uint8)
    with SlotRing(2, 10, device=None) as ring, pytest.raises(PrepDeviceError, match="a copy failed: CUDA error: late"):
        transfer(make_loads(target, 2, 10), ring, Broken(), lambda _: None)
