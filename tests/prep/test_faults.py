"""Holds preparation on every device to leaving nothing behind after a fault: memory, locks, threads, cache entries.

Each fault is injected at each place where it can strike; then the same preparation without it must succeed.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from format.files.test_pollers import kernel_threads, needs_pollers, needs_workers
from format.files.test_uring import needs_ring
from prep.samples import Layer, extent_of, lock_on_cpu, open_layer, random_layer, write_checkpoint
from trellis_format.files.pollers import KernelReads, Ticket
from trellis_format.files.uring import Ring
from trellis_prep import (
    PreparedCache,
    PrepDeviceError,
    PrepMemoryError,
    PrepReadError,
    StagingBuffer,
    TrellisStaging,
    lanes,
    pinned,
    plan,
    plan_preparation,
    prepare,
    stage,
    transfer,
)
from trellis_prep.pinned import registered_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
READERS = [1, 3]
BOUND = 80_000
CUT = r"expert \d \w+: (truncated|the file changed)"  # whichever thread is first
EXTENT = extent_of(384, 0, 1)


@dataclass
class Scene:
    """A layer in a file, a device, and an eye on what is held there."""

    device: str
    shard: Path
    layer: Layer
    cache: PreparedCache
    staging: TrellisStaging
    patch: pytest.MonkeyPatch
    storages: list[StorageWeakRef]
    before: int

    def prepare(self, *, cached: bool, **options: Any) -> torch.Tensor:
        """The codes of a preparation, through the cache or not."""
        run = self.cache.prepare if cached else prepare
        return run(*self.layer, device=self.device, staging=self.staging, extent=EXTENT, poison=True, **options).codes

    def fail(self, kind: type[BaseException], message: str | None, *, cached: bool, **options: Any) -> None:
        """Prepare, expecting an error, and check that nothing is left while the error is still held."""
        with pytest.raises(kind, match=message) as caught:
            self.prepare(cached=cached, **options)
        assert caught.value is not None
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        assert registered_bytes() == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "trellis-prep-reader"]
        assert all(storage.expired() for storage in self.storages)
        if self.device == "cuda":
            assert torch.cuda.memory_allocated() == self.before
        assert not self.cache.directory.exists() or list(self.cache.directory.iterdir()) == []


@pytest.fixture(params=READERS, ids=lambda count: f"{count} readers")
def readers(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(params=DEVICES)
def scene(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> Iterator[Scene]:
    """Five experts of mixed rates with biases; on a CPU the slots are locked with a runtime that counts."""
    made = random_layer(experts=5, biased=True)
    checkpoint, source, weights = open_layer(write_checkpoint(tmp_path, made))
    if request.param == "cpu":
        lock_on_cpu(monkeypatch)
    storages: list[StorageWeakRef] = []
    empty = torch.empty

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        if options.get("device") is not None:
            storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    before = torch.cuda.memory_allocated() if request.param == "cuda" else 0
    with checkpoint, monkeypatch.context() as patch:
        yield Scene(
            request.param, tmp_path / "model.safetensors", (source, weights), PreparedCache(tmp_path / "cache"),
            TrellisStaging(max_bytes=BOUND, readers=readers), patch, storages, before,
        )  # fmt: skip


def at_call(number: int, action: Callable[[], object], honest: Callable[..., Any]) -> Callable[..., Any]:
    """A function that acts before one of its calls, and is the honest one at all others."""
    calls = itertools.count()

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            action()
        return honest(*arguments, **options)

    return call


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("number", [0, 1, 7, 100, 160])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_error_of_the_disk(scene: Scene, cached: bool, number: int, code: int) -> None:
    with scene.patch.context() as patch:
        patch.setattr(os, "preadv", at_call(number, raising(OSError(code, os.strerror(code))), os.preadv))
        scene.fail(
            PrepReadError, rf"experts\.\d\.\w+_proj.trellis: expert \d \w+: .*{os.strerror(code)}", cached=cached
        )
    assert torch.equal(scene.prepare(cached=cached), scene.prepare(cached=cached))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("number", [0, 7, 140])
def test_file_truncated_during_the_read(scene: Scene, cached: bool, number: int) -> None:
    whole = scene.shard.read_bytes()
    with scene.patch.context() as patch:
        patch.setattr(os, "preadv", at_call(number, lambda: os.truncate(scene.shard, 3000), os.preadv))
        scene.fail(PrepReadError, CUT, cached=cached)
    assert len(whole) > 3000


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("fault", ["error", "truncated", "changed", "interrupt"])
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("ring", marks=needs_ring),
        pytest.param("workers", marks=needs_workers),
        pytest.param("pollers", marks=needs_pollers),
    ],
)
def test_fault_while_many_runs_are_read_at_a_time(scene: Scene, way: str, fault: str, number: int) -> None:
    scene.patch.setattr(transfer, "MANY_BYTES", 1)
    if way != "ring":
        for name, value in (
            ("LEAST_POLLED", 1),
            ("LEAST_CORES", 1),
            ("MOST_POLLERS", 2),
            ("LEAST_POLLED_SLOT", 16_000),
        ):
            scene.patch.setattr(plan, name, value)
        scene.patch.setattr(plan, "LONG_RUN", 1 if way == "workers" else 1 << 30)
        scene.patch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
        scene.staging = TrellisStaging(max_bytes=BOUND)
        planned = plan_preparation(scene.layer[0], staging=scene.staging, extent=EXTENT)
        assert (planned.workers, planned.pollers) == ((True, 0) if way == "workers" else (False, 2))
    expected = scene.prepare(cached=False).cpu().clone()
    main, calls = threading.main_thread().ident, itertools.count()
    assert main is not None
    actions: dict[str, tuple[Callable[[], object], type[BaseException], str | None]] = {
        "error": (lambda: None, PrepReadError, r"expert \d \w+: .*Input/output error"),
        "truncated": (lambda: os.truncate(scene.shard, 3000), PrepReadError, CUT),
        "changed": (lambda: os.utime(scene.shard, ns=(1, 1)), PrepReadError, r"expert \d \w+: the file changed"),
        "interrupt": (lambda: signal.pthread_kill(main, signal.SIGINT), KeyboardInterrupt, None),
    }
    action, kind, message = actions[fault]
    owner, method = (Ring, "run") if way == "ring" else (KernelReads, "start")
    honest: Callable[..., Any] = getattr(owner, method)

    def faulty(self: object, *arguments: Any) -> Any:
        if next(calls) != number:
            return honest(self, *arguments)
        action()
        found = honest(self, *arguments)
        if fault != "error":
            return found
        if isinstance(found, Ticket):
            found.short.append(0)
            return found
        return found * 0

    with scene.patch.context() as patch:
        patch.setattr(owner, method, faulty)
        if fault == "error":
            patch.setattr(os, "preadv", at_call(0, raising(OSError(errno.EIO, os.strerror(errno.EIO))), os.preadv))
        scene.fail(kind, message, cached=False)
    assert next(calls) > number, "the reads were made together"
    assert not kernel_threads()
    if fault in ("error", "interrupt"):
        assert torch.equal(scene.prepare(cached=False).cpu(), expected)


@pytest.mark.parametrize("most", [48, 1000])
def test_short_reads_are_continued(scene: Scene, most: int) -> None:
    expected, preadv = scene.prepare(cached=False), os.preadv
    with scene.patch.context() as patch:
        patch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:most]], offset))
        assert torch.equal(scene.prepare(cached=False), expected)


@pytest.mark.parametrize("cached", [False, True])
def test_memory_that_runs_out_at_each_allocation(scene: Scene, cached: bool) -> None:
    planned = plan_preparation(scene.layer[0], staging=scene.staging, extent=EXTENT)
    for number, tensor in enumerate(planned.layout.tensors):
        with scene.patch.context() as patch:
            patch.setattr(
                torch, "empty", at_call(number, raising(torch.OutOfMemoryError("out of memory")), torch.empty)
            )
            scene.fail(PrepMemoryError, rf"{tensor.name} of {tensor.nbytes} bytes cannot be had", cached=cached)
    with scene.patch.context() as patch:
        patch.setattr(pinned.mmap, "mmap", at_call(0, raising(OSError(errno.ENOMEM, "no memory")), pinned.mmap.mmap))
        scene.fail(PrepMemoryError, f"staging of {planned.host_bytes} bytes cannot be had on the host", cached=cached)
    with scene.patch.context() as patch:
        patch.setattr(pinned, "_register", raising_memory(planned.host_bytes))
        scene.fail(PrepMemoryError, "cannot be page-locked", cached=cached)
    assert scene.prepare(cached=cached).numel()


def raising_memory(nbytes: int) -> Callable[..., None]:
    def register(*_: object) -> None:
        raise PrepMemoryError(f"staging of {nbytes} bytes cannot be page-locked for a test")

    return register


@pytest.mark.parametrize("number", [0, 1, 4])
def test_copy_that_fails(scene: Scene, number: int) -> None:
    lane = lanes.CudaLane if scene.device == "cuda" else lanes.CpuLane
    for name in ("copy", "mark"):
        with scene.patch.context() as patch:
            error = RuntimeError("CUDA error: unspecified launch failure")
            patch.setattr(lane, name, at_call(number, raising(error), getattr(lane, name)))
            scene.fail(PrepDeviceError, r"the copy of \d+ bytes failed: CUDA error", cached=True)


@pytest.mark.parametrize("cached", [False, True])
def test_interrupts(scene: Scene, cached: bool) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    scene.fail(KeyboardInterrupt, None, cached=cached, progress=progress)
    main = threading.main_thread().ident
    assert main is not None
    for number in (0, 40):
        with scene.patch.context() as patch:
            patch.setattr(os, "preadv", at_call(number, lambda: signal.pthread_kill(main, signal.SIGINT), os.preadv))
            scene.fail(KeyboardInterrupt, None, cached=cached)
    assert scene.prepare(cached=cached).numel()


def test_kept_buffer_outlives_a_fault_and_goes_with_its_context(scene: Scene) -> None:
    if scene.device == "cpu":
        scene.patch.setattr(stage, "HostBuffer", pinned.HostBuffer)
    with StagingBuffer(scene.device) as buffer:
        for number in (0, 9):
            with scene.patch.context() as patch:
                patch.setattr(os, "preadv", at_call(number, raising(OSError(errno.EIO, "no")), os.preadv))
                with pytest.raises(PrepReadError):
                    scene.prepare(cached=False, buffer=buffer)
        assert scene.prepare(cached=False, buffer=buffer).numel()
    assert registered_bytes() == 0


@pytest.mark.gpu
def test_device_that_is_full_says_so_and_is_left_as_it_was() -> None:
    layer = random_layer(experts=8, hidden=1024, intermediate=768, rates=("8",))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        with pytest.raises(PrepMemoryError, match=r"codes of \d+ bytes cannot be had on cuda:0"):
            prepare(*layer, device="cuda")
        assert torch.cuda.memory_allocated() == before
        assert registered_bytes() == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert free
    assert prepare(*layer, device="cuda").nbytes > 0
