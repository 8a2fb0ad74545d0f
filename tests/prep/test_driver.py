"""Holds copies through CUDA's driver to their arguments, and its refusals to being told."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from trellis_prep import driver
from trellis_prep.driver import DriverStream
from trellis_prep.pinned import HostBuffer

CONTEXT = 0x1234


class Driver:
    """A driver that notes what it is asked, and refuses where it is told to."""

    def __init__(self, **refusals: int) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._refusals = refusals

    def cuStreamGetCtx(self, stream: ctypes.c_void_p, context: Any) -> int:  # the driver's
        context._obj.value = CONTEXT
        return self._note("cuStreamGetCtx", stream.value)

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        return self._note("cuCtxSetCurrent", context.value)

    def cuMemcpyHtoDAsync_v2(self, *arguments: int) -> int:
        return self._note("cuMemcpyHtoDAsync_v2", *arguments)

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of luck" if status != 3 else None
        return 0

    def _note(self, name: str, *arguments: Any) -> int:
        self.asked.append((name, *arguments))
        return self._refusals.get(name, 0)


def test_copies_are_issued_to_the_stream_in_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    stream = DriverStream.of(77)
    assert stream is not None
    stream.enter()
    stream.copy(1 << 40, 4096, 100)
    assert fake.asked == [
        ("cuStreamGetCtx", 77), ("cuCtxSetCurrent", CONTEXT), ("cuMemcpyHtoDAsync_v2", 1 << 40, 4096, 100, 77),
    ]  # fmt: skip


@pytest.mark.parametrize(("status", "text"), [(700, "out of luck"), (3, "unknown")])
def test_what_the_driver_refuses_is_told(status: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver(cuMemcpyHtoDAsync_v2=status, cuCtxSetCurrent=status)
    monkeypatch.setattr(driver, "_library", lambda: fake)
    stream = DriverStream.of(77)
    assert stream is not None
    for ask in (stream.enter, lambda: stream.copy(0, 0, 1)):
        with pytest.raises(RuntimeError, match=rf"CUDA error: {text} \({status}\)"):
            ask()


def test_there_is_none_without_a_driver_or_for_a_stream_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (None, Driver(cuStreamGetCtx=400)):
        monkeypatch.setattr(driver, "_library", lambda library=library: library)
        assert DriverStream.of(77) is None
    monkeypatch.undo()
    monkeypatch.setattr(driver, "_LIBRARY", "libnosuchcuda.so.1")
    assert driver._library.__wrapped__() is None
    monkeypatch.setattr(driver, "_LIBRARY", "libc.so.6")  # which has no such symbols
    assert driver._library.__wrapped__() is None


@pytest.mark.gpu
def test_gpu_copy_arrives() -> None:
    device, nbytes = torch.device("cuda", 0), 1 << 20
    target, stream = torch.zeros(nbytes + 2, dtype=torch.uint8, device=device), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    made = DriverStream.of(stream.cuda_stream)
    assert made is not None
    buffer = HostBuffer(nbytes, device=device)
    buffer.array[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    made.enter()
    made.copy(target.data_ptr() + 1, buffer.array.ctypes.data, nbytes)
    stream.synchronize()
    assert target[1:-1].cpu().numpy().tobytes() == buffer.array.tobytes()
    assert target[[0, -1]].tolist() == [0, 0]
    buffer.close()
