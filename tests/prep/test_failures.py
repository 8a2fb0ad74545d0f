"""Holds a preparation that fails midway to naming what failed, and to giving back everything that it took."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from prep.samples import FakeCudart, Layer, hooked, lock_on_cpu, open_layer, random_layer, write_checkpoint
from trellis_format.errors import FormatValueError
from trellis_prep import (
    PrepDeviceError,
    PrepMemoryError,
    PrepReadError,
    PrepValueError,
    TrellisStaging,
    plan_preparation,
    prepare,
)
from trellis_prep.lanes import CpuLane
from trellis_prep.pinned import registered_bytes

ONE_AT_A_TIME = TrellisStaging(max_experts=1, readers=1)


class Taken:
    """What a preparation took: the storages of its tensors, and the host memory that it locked."""

    def __init__(self, cudart: FakeCudart) -> None:
        self.cudart = cudart
        self.storages: list[StorageWeakRef] = []

    def check_all_given_back(self) -> None:
        assert self.cudart.registered, "nothing was locked, so this shows nothing"
        assert (self.cudart.held, registered_bytes()) == ({}, 0)
        assert self.storages
        assert all(storage.expired() for storage in self.storages)
        assert not [thread for thread in threading.enumerate() if thread.name == "trellis-prep-reader"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """Preparation on a CPU that locks its slots as for a GPU, with its memory watched."""
    watch = Taken(lock_on_cpu(monkeypatch))
    empty = torch.empty

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        if options.get("device") is not None:
            watch.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    yield watch
    assert (watch.cudart.held, registered_bytes()) == ({}, 0)


def raising(error: BaseException) -> Callable[[], None]:
    def hook() -> None:
        raise error

    return hook


@pytest.fixture
def layer() -> Layer:
    """Four experts of mixed rates."""
    return random_layer(experts=4)


def test_success_unlocks_exactly_the_planned_ring(taken: Taken, layer: Layer) -> None:
    staging = TrellisStaging(max_bytes=400_000)
    prepared = prepare(*layer, staging=staging, poison=True)
    assert taken.cudart.registered == [plan_preparation(layer[0], staging=staging).host_bytes]
    assert taken.cudart.registered[0] <= 400_000
    assert (taken.cudart.held, registered_bytes()) == ({}, 0)
    assert not any(storage.expired() for storage in taken.storages)
    assert prepared.nbytes == prepared.layout.total_bytes


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.EIO, "Input/output error"), PrepReadError, "expert 2 up: cannot be read: Input/output error"),
        (FormatValueError("truncated", file="f", tensor="t"), PrepReadError, "f: t: expert 2 up: truncated"),
        (MemoryError(), PrepMemoryError, r"expert 2 up: memory ran out while \d+ bytes were read"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
)
def test_failed_read_names_expert_and_projection(
    taken: Taken, layer: Layer, error: BaseException, kind: type[BaseException], message: str | None
) -> None:
    broken = hooked(layer, 2, 1, raising(error))
    with pytest.raises(kind, match=message) as caught:
        prepare(*broken, staging=ONE_AT_A_TIME)
    taken.check_all_given_back()  # while the exception is still held
    assert caught.value is not None


@pytest.fixture
def opened(tmp_path: Path, layer: Layer) -> Iterator[tuple[Path, Layer]]:
    """The shard of a checkpoint with the layer, and the layer with its codes in that file."""
    checkpoint, source, weights = open_layer(write_checkpoint(tmp_path, layer))
    with checkpoint:
        yield tmp_path / "model.safetensors", (source, weights)


def test_truncation_during_the_read_names_file_and_tensor(taken: Taken, opened: tuple[Path, Layer]) -> None:
    shard, layer = opened
    cut = hooked(layer, 1, 2, lambda: os.truncate(shard, 2000))
    with pytest.raises(PrepReadError, match=r"experts\.1\.down_proj\.trellis: expert 1 down: truncated") as caught:
        prepare(*cut, staging=ONE_AT_A_TIME)
    assert caught.value.file == str(shard)
    assert caught.value.tensor == "model.layers.0.mlp.experts.1.down_proj.trellis"
    taken.check_all_given_back()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_error_of_the_disk_names_file_and_tensor(
    taken: Taken, opened: tuple[Path, Layer], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    shard, layer = opened

    def fail() -> None:
        def preadv(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "preadv", preadv)

    with pytest.raises(PrepReadError, match=rf"expert 3 gate: .*{os.strerror(code)}") as caught:
        prepare(*hooked(layer, 3, 0, fail), staging=ONE_AT_A_TIME)
    assert caught.value.file == str(shard)
    assert str(caught.value.tensor).endswith("experts.3.gate_proj.trellis")
    taken.check_all_given_back()


def test_short_reads_are_continued(
    taken: Taken, opened: tuple[Path, Layer], layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, filed = opened
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:1000]], offset)
    )
    assert torch.equal(prepare(*filed).codes, prepare(*layer).codes)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("from the caller")])
def test_interrupt_in_the_callers_thread_frees_everything(taken: Taken, layer: Layer, error: BaseException) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(type(error)) as caught:
        prepare(*layer, staging=ONE_AT_A_TIME, progress=progress)
    assert caught.value is error
    taken.check_all_given_back()


def test_signal_during_a_read_frees_everything(taken: Taken, layer: Layer) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)  # the reader is in the middle of its work while the caller's thread is interrupted

    with pytest.raises(KeyboardInterrupt):
        prepare(*hooked(layer, 1, 0, interrupt), staging=ONE_AT_A_TIME)
    taken.check_all_given_back()


def test_failed_copy_frees_everything(taken: Taken, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = CpuLane.copy
    calls: list[int] = []

    def fail_late(self: CpuLane, slot: Any, moves: Any) -> None:
        calls.append(len(moves))
        if len(calls) == 2:
            raise RuntimeError("CUDA error: unspecified launch failure")
        copy(self, slot, moves)

    monkeypatch.setattr(CpuLane, "copy", fail_late)
    with pytest.raises(PrepDeviceError, match=r"codes of experts 1\.\.2: the copy of \d+ bytes failed: CUDA error"):
        prepare(*layer, staging=ONE_AT_A_TIME)
    taken.check_all_given_back()


def test_final_memory_that_runs_out_frees_what_was_there(
    taken: Taken, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, calls = torch.empty, []

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("device") is not None:
            calls.append(arguments)
            if len(calls) == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return watched(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(PrepMemoryError, match=r"intermediate_scales of \d+ bytes cannot be had on cpu"):
        prepare(*layer)
    assert taken.cudart.registered == [], "slots were locked before the final memory was there"
    assert len(taken.storages) == 3
    assert all(storage.expired() for storage in taken.storages)


def test_slots_that_cannot_be_locked_free_the_final_memory(taken: Taken, layer: Layer) -> None:
    taken.cudart.status = 2
    with pytest.raises(PrepMemoryError, match="cannot be page-locked for cuda:0"):
        prepare(*layer)
    assert taken.storages
    assert all(storage.expired() for storage in taken.storages)


def test_nothing_is_taken_when_the_arguments_are_wrong(taken: Taken, layer: Layer) -> None:
    with pytest.raises(PrepValueError, match="insufficient"):
        prepare(*layer, staging=TrellisStaging(max_bytes=1000))
    with pytest.raises(PrepValueError, match="codes are of"):
        prepare(layer[0], random_layer(experts=3)[1])
    assert (taken.storages, taken.cudart.registered) == ([], [])


def test_error_that_the_caller_handles_keeps_its_frames(layer: Layer) -> None:
    def outer() -> None:
        precious = "local"
        raise KeyError(precious)

    try:
        outer()
    except KeyError as handled:
        with pytest.raises(PrepReadError):
            prepare(*hooked(layer, 0, 0, raising(OSError(errno.EIO, "no"))))
        trace = handled.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        assert trace.tb_next.tb_frame.f_locals["precious"] == "local"


@pytest.mark.gpu
@pytest.mark.parametrize("error", [OSError(errno.EIO, "no"), MemoryError(), KeyboardInterrupt()])
def test_gpu_memory_and_locks_are_given_back(layer: Layer, error: BaseException) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises((PrepReadError, PrepMemoryError, KeyboardInterrupt)) as caught:
        prepare(*hooked(layer, 2, 1, raising(error)), device="cuda", staging=ONE_AT_A_TIME)
    assert torch.cuda.memory_allocated() == before, "held by the exception"
    assert registered_bytes() == 0
    assert caught.value is not None
