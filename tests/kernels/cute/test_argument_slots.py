"""Holds argument slots to their promise: the storage that the function reads is what was set last."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import pytest

cuda = pytest.importorskip("cuda.bindings.driver", reason="nvidia-cutlass-dsl is not installed")

from cutlass import Float32, Int32, Int64  # noqa: E402  # needs the DSL

from trellis_kernels.cute.argument_slots import ArgumentSlots  # noqa: E402  # needs the DSL


class Sample(NamedTuple):
    """An argument of each kind."""

    address: Int64
    count: Int32
    factor: Float32


class FakeKernel:
    """Marshals as the DSL does, into storage of its own, and records what a call would read."""

    def __init__(self) -> None:
        self.execution_args = SimpleNamespace(generate_execution_args=self.generate)
        self.calls: list[list[float]] = []

    def generate(self, values, _):
        self.storage = [
            (ctypes.c_float if isinstance(value, Float32) else ctypes.c_int64)(value.value) for value in values[0]
        ]
        stream = values[-1]
        pointers = [ctypes.cast(ctypes.pointer(cell), ctypes.c_void_p) for cell in self.storage]
        return [*pointers, stream.getPtr()], list(values)

    def run_compiled_program(self, pointers) -> None:
        stream = ctypes.c_int64.from_address(pointers[-1]).value
        self.calls.append([cell.value for cell in self.storage] + [stream])


def test_a_call_reads_what_was_set() -> None:
    kernel = FakeKernel()
    slots = ArgumentSlots(kernel, Sample, cuda.CUstream(0))
    slots()
    slots.set(address=1 << 40, count=7, factor=0.25, stream=1 << 33)
    slots()
    slots.set(count=8)
    slots()
    assert kernel.calls == [[0, 0, 0.0, 0], [1 << 40, 7, 0.25, 1 << 33], [1 << 40, 8, 0.25, 1 << 33]]
