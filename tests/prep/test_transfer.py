"""Holds the pipeline to reading ahead, to order, and to stopping both threads on any failure."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exl3_files import write_shard
from format.files.test_pollers import WAYS, kernel_threads
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.files.pollers import KernelReads
from trellis_format.files.reads import Reads
from trellis_format.files.uring import SQE
from trellis_prep import PrepDeviceError
from trellis_prep import transfer as transfer_module
from trellis_prep.lanes import CpuLane, Move
from trellis_prep.slots import Completion, Slot, SlotRing
from trellis_prep.transfer import Load, Read, transfer


def make_loads(target: torch.Tensor, count: int, size: int, log: list[Any] | None = None) -> Iterator[Load]:
    """Loads of two reads each; load i fills its part of the target with i + 1."""
    for number in range(count):

        def fill(out: np.ndarray[Any, Any], number: int = number) -> None:
            out.fill((number + 1) & 0xFF)
            if log is not None:
                log.append(("read", number))

        half = size // 2
        reads = (Read(0, half, fill), Read(half, size - half, fill))
        yield Load(f"load {number}", reads, (Move(0, target, number * size, size),))


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_load_arrives(slots: int, count: int) -> None:
    target = torch.full((count * 10,), 0xEE, dtype=torch.uint8)
    moved: list[int] = []
    with SlotRing(slots, 10, device=None, poison=True) as ring:
        transfer(make_loads(target, count, 10), ring, CpuLane(), moved.append)
    assert target.tolist() == [number + 1 for number in range(count) for _ in range(10)]
    assert moved == [10] * count


class FileLoad(Load):
    """A load that lies in a file, whose reads are of 600 and 400 bytes."""

    def planned(self, address: int) -> Reads | None:
        entries = np.zeros(2, dtype=SQE)
        entries["address"] = address, address + 600
        return Reads(entries, np.array([600, 400]), np.arange(2))

    def unread(self, short: set[int]) -> list[Read]:
        return [self.reads[index] for index in sorted(short)]


@pytest.mark.parametrize("missing", [[], [1], [0, 1]])
def test_reads_of_files_are_one_and_what_it_missed_is_filled(
    missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring writes 1 and 2, `fill` writes 11 and 12."""
    runs, filled = [], []

    class Ring:
        @staticmethod
        def run(entries: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            runs.append(len(entries))
            for value, (address, size) in enumerate(zip(entries["address"].tolist(), (600, 400), strict=True), 1):
                ctypes.memset(address, value, size)
            return np.array([599 if 0 in missing else 600, -5 if 1 in missing else 400])

    def fill(number: int, out: np.ndarray[Any, Any]) -> None:
        filled.append(number)
        out.fill(11 + number)

    monkeypatch.setattr(transfer_module, "thread_ring", Ring)
    monkeypatch.setattr(transfer_module, "MANY_BYTES", 1000)
    target = torch.zeros(3000, dtype=torch.uint8)
    reads = tuple(Read(n * 600, 600 - 200 * n, partial(fill, n)) for n in range(2))
    loads = [
        FileLoad("whole", reads, (Move(0, target, 0, 1000),)),
        Load("in memory", reads, (Move(0, target, 1000, 1000),)),
        FileLoad("small", reads[:1], (Move(0, target, 2000, 600),)),
    ]
    with SlotRing(1, 1000, device=None) as ring:
        transfer(iter(loads), ring, CpuLane(), None)
    assert runs == [2], "only a large load, and only where all of it lies in files"
    assert filled == [*missing, 0, 1, 0]
    found = [target[first].item() for first in (0, 999, 1000, 1999, 2000)]
    assert found == [11 if 0 in missing else 1, 12 if 1 in missing else 2, 11, 12, 11]


@pytest.mark.parametrize(("slots", "readers"), [(2, 2), (4, 2), (10, 5)])
def test_readers_fill_slots_at_a_time(slots: int, readers: int) -> None:
    target = torch.full((400,), 0xEE, dtype=torch.uint8)
    together = threading.Barrier(readers)

    def loads() -> Iterator[Load]:
        for number in range(40):

            def fill(out: np.ndarray[Any, Any], number: int = number) -> None:
                together.wait(10)  # every other thread is filling a slot too
                out.fill(number + 1)

            yield Load(f"load {number}", (Read(0, 10, fill),), (Move(0, target, 10 * number, 10),))

    moved: list[int] = []
    with SlotRing(slots, 10, device=None, poison=True) as ring:
        transfer(loads(), ring, CpuLane(), moved.append, readers=readers)
    assert target.tolist() == [number + 1 for number in range(40) for _ in range(10)]
    assert moved == [10] * 40
    assert reader_threads() == []


@pytest.mark.parametrize("error", [ValueError("bad bytes"), KeyboardInterrupt()])
def test_failed_read_stops_every_reader(error: BaseException) -> None:
    target, log = torch.zeros(10_000, dtype=torch.uint8), []

    def loads() -> Iterator[Load]:
        for number, load in enumerate(make_loads(target, 1000, 10, log)):
            yield load if number != 20 else Load("bad", (Read(0, 1, fail),), ())

    def fail(_: object) -> None:
        raise error

    with SlotRing(3, 10, device=None) as ring, pytest.raises(type(error)) as caught:
        transfer(loads(), ring, CpuLane(), lambda _: None, readers=4)
    assert caught.value is error
    assert reader_threads() == []
    assert len(log) < 2000


def test_thread_that_cannot_be_started_stops_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def fail_third(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail_third)
    target = torch.zeros(10_000, dtype=torch.uint8)
    with SlotRing(2, 10, device=None) as ring, pytest.raises(RuntimeError, match="can't start"):
        transfer(make_loads(target, 1000, 10), ring, CpuLane(), lambda _: None, readers=4)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("pollers", WAYS)
def test_the_kernel_fills_what_lies_in_files_in_order(
    tmp_path: Path, slots: int, pollers: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> KernelReads:
        raise OSError("no more")

    monkeypatch.setattr(transfer_module, "MANY_BYTES", 1)
    if not given:
        monkeypatch.setattr(transfer_module, "open_pollers", refuse)
        monkeypatch.setattr(transfer_module, "open_workers", refuse)
    codes = np.random.default_rng(3).integers(0, 256, (20, 500), dtype=np.uint8)
    header = read_header(write_shard(tmp_path / "a.safetensors", {"codes": codes}))
    view = FileArray(ShardReader(header), header.entries["codes"])
    target, moved, filled = torch.full((10_000,), 0xEE, dtype=torch.uint8), [], []

    def loads() -> Iterator[Load]:
        for row in range(20):
            box = (slice(row, row + 1), slice(0, 500))

            def fill(out: np.ndarray[Any, Any], row: int = row, box: tuple[slice, ...] = box) -> None:
                filled.append(row)
                view.read_box(box, out)

            runs = None if row % 5 == 0 else view.runs(box)
            yield Load(f"{row}", (Read(0, 500, fill, runs),), (Move(0, target, row * 500, 500),))

    with SlotRing(slots, 500, device=None, poison=True) as ring:
        transfer(loads(), ring, CpuLane(), moved.append, pollers=pollers, workers=not pollers)
    assert target.numpy().tobytes() == codes.tobytes()
    assert moved == [500] * 20
    assert filled == [0, 5, 10, 15], "a thread with a ring reads what lies in files at a time too"
    assert not kernel_threads()


class LateLane(CpuLane):
    """A lane whose copies are done when their end is waited for, which waits at a gate."""

    def __init__(self) -> None:
        self.gate, self.waiting = threading.Semaphore(0), threading.Event()
        self.issued: list[tuple[Slot, Sequence[Move]]] = []

    def copy(self, slot: Slot, moves: Sequence[Move]) -> None:
        self.issued.append((slot, moves))

    def mark(self, slot: Slot) -> Completion:
        number = len(self.issued) - 1

        class End:
            @staticmethod
            def query() -> bool:
                return False

            @staticmethod
            def synchronize() -> None:
                self.waiting.set()
                assert self.gate.acquire(timeout=10)
                slot, moves = self.issued[number]
                for move in moves:
                    move.part.copy_(slot._tensor[move.first : move.first + move.nbytes])

        return End()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_reader_is_ahead_of_the_copy_by_the_slots_and_no_more(slots: int) -> None:
    target = torch.zeros(50, dtype=torch.uint8)
    log: list[Any] = []
    lane = LateLane()

    def run() -> None:
        with SlotRing(slots, 10, device=None) as ring:
            transfer(make_loads(target, 5, 10, log), ring, lane, lambda _: None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert lane.waiting.wait(10)
    threading.Event().wait(0.05)
    assert len(log) == 2 * slots, "a slot was filled again before its copy"
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
    assert len(log) < 2 * 1000, "the reader went on to the end"
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
