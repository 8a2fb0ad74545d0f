"""Holds launches to handing over what they are given, each time and in each thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

import pytest
import torch

from trellis_kernels.cute.prefill_key import PrefillScheduleKey
from trellis_kernels.errors import KernelValueError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import compiler, launches
from trellis_kernels.cute.argument_tuples import kinds
from trellis_kernels.cute.prefill_arguments import ScheduleArguments

KEY = PrefillScheduleKey("sm_90a")
NAMES = tuple(kinds(ScheduleArguments))
DEVICE = torch.device("cuda", 0)


class Recorded:
    """A compiled kernel whose runs are noted instead of made."""

    def __init__(self) -> None:
        self.execution_args: Any = compiler.compile_kernel(KEY).execution_args
        self.runs: list[tuple[int, ...]] = []

    def run_compiled_program(self, pointers: list[Any]) -> None:
        """Note the numbers, each in the bytes of its kind, and the stream."""
        sizes = [ctypes.c_int64] * 7 + [ctypes.c_int32] * 5 + [ctypes.c_int64]
        places = [pointer if isinstance(pointer, int) else pointer.value for pointer in pointers]
        self.runs.append(tuple(kind.from_address(place).value for kind, place in zip(sizes, places, strict=True)))


class Stream:
    """A stream that is nothing but its handle."""

    cuda_stream = 77


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(launches, "_kept", launches._Kept())
    monkeypatch.setattr(compiler, "ready", lambda _key: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return made


def launch(**values: Any) -> None:
    launches.launch(KEY, DEVICE, ScheduleArguments, **values)


def test_values_reach_their_places_and_what_is_not_given_is_0(kernel: Recorded) -> None:
    tensor = torch.zeros(4)
    launch(counts=tensor, entries=5, last_half_bits=9)
    launch(offsets=1 << 40, experts=-1)
    first = dict.fromkeys(NAMES, 0) | {"counts": tensor.data_ptr(), "entries": 5, "last_half_bits": 9}
    second = dict.fromkeys(NAMES, 0) | {"offsets": 1 << 40, "experts": -1}
    assert kernel.runs == [(*first.values(), 77), (*second.values(), 77)]


def test_none_is_the_address_0(kernel: Recorded) -> None:
    launch(counts=None, experts=2)
    assert kernel.runs == [(*(dict.fromkeys(NAMES, 0) | {"experts": 2}).values(), 77)]


def test_a_field_that_there_is_not_is_refused(kernel: Recorded) -> None:
    with pytest.raises(KernelValueError, match="ScheduleArguments has no field expert, slot"):
        launch(slot=1, expert=2)
    assert kernel.runs == []


def test_arguments_stay_in_place_for_each_thread_and_kernel(kernel: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = launches.ArgumentSlots
    monkeypatch.setattr(launches, "ArgumentSlots", lambda *parts: made.append(parts[0]) or real(*parts))
    for experts in range(3):
        launch(experts=experts)
    thread = threading.Thread(target=launch, kwargs={"experts": 3})
    thread.start()
    thread.join()
    assert made == [kernel, kernel]
    other = Recorded()
    monkeypatch.setattr(compiler, "ready", lambda _key: other)
    launch(experts=4)  # as after the kernels of a process were made anew
    assert made[2:] == [other]
    experts_at = NAMES.index("experts")
    assert [run[experts_at] for run in kernel.runs + other.runs] == [0, 1, 2, 3, 4]
