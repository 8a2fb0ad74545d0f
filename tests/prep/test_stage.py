"""Holds a staging buffer to what it promises: kept from layer to layer, within bounds, one user at a time."""

from __future__ import annotations

import errno

import pytest
import torch

from prep.samples import FakeCudart, hooked, lock_on_cpu, random_layer
from trellis_prep import (
    PrepReadError,
    PrepStateError,
    PrepValueError,
    StagingBuffer,
    TrellisStaging,
    plan_preparation,
    prepare,
    stage,
)
from trellis_prep.pinned import HostBuffer, registered_bytes


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """Buffers on a CPU that are locked as for a GPU."""
    fake = lock_on_cpu(monkeypatch)
    monkeypatch.setattr(stage, "HostBuffer", lambda nbytes, device: HostBuffer(nbytes, device=torch.device("cuda", 0)))
    return fake


def test_layers_pass_through_one_buffer(cudart: FakeCudart) -> None:
    layers = [random_layer(experts=5, seed=seed) for seed in range(3)]
    staging = TrellisStaging(max_bytes=400_000)
    with StagingBuffer() as buffer:
        for layer in layers:
            prepared = prepare(*layer, staging=staging, buffer=buffer, poison=True)
            assert torch.equal(prepared.codes, prepare(*layer).codes)
            assert buffer.nbytes == plan_preparation(layer[0], staging=staging).host_bytes <= 400_000
    alone = [plan_preparation(layer[0]).host_bytes for layer in layers]
    assert cudart.registered == [plan_preparation(layers[0][0], staging=staging).host_bytes, *alone]
    assert (cudart.held, registered_bytes(), buffer.nbytes) == ({}, 0, 0)


def test_buffer_is_exchanged_where_it_is_too_small_or_above_the_bound(cudart: FakeCudart) -> None:
    layer = random_layer(experts=6)
    with StagingBuffer() as buffer:
        sizes = []
        for max_bytes in (200_000, 1 << 20, 300_000):
            prepare(*layer, staging=TrellisStaging(max_bytes=max_bytes), buffer=buffer)
            sizes.append(buffer.nbytes)
            assert buffer.nbytes <= max_bytes
            assert list(cudart.held.values()) == [buffer.nbytes], "two buffers were held"
        assert sizes[0] < sizes[1] > sizes[2]
        smaller = random_layer(experts=1)
        prepare(*smaller, buffer=buffer)
        assert buffer.nbytes == sizes[2], "a smaller layer does not lock pages again"


def test_failure_leaves_the_buffer_usable_and_its_end_frees_it(cudart: FakeCudart) -> None:
    layer = random_layer(experts=4)

    def fail() -> None:
        raise OSError(errno.EIO, "no")

    with StagingBuffer() as buffer:
        with pytest.raises(PrepReadError, match="expert 2 up"):
            prepare(*hooked(layer, 2, 1, fail), buffer=buffer)
        assert torch.equal(prepare(*layer, buffer=buffer).codes, prepare(*layer).codes)
    assert (cudart.held, registered_bytes()) == ({}, 0)


def test_buffer_serves_one_preparation_at_a_time() -> None:
    layer = random_layer()
    with StagingBuffer("cpu") as buffer:
        seen: list[str] = []

        def again(done: int, total: int) -> None:
            for call in (lambda: prepare(*layer, buffer=buffer), buffer.close):
                with pytest.raises(PrepStateError) as caught:
                    call()
                seen.append(str(caught.value))

        prepare(*layer, buffer=buffer, progress=again)
        assert "lent to another one; take a second buffer" in seen[0]
        assert "cannot be closed while a preparation uses it" in seen[1]
    with pytest.raises(PrepStateError, match="this one is closed"):
        prepare(*layer, buffer=buffer)


def test_buffer_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = StagingBuffer("cpu")
    buffer.device = torch.device("cuda", 1)
    with pytest.raises(PrepValueError, match="the staging buffer is for cuda:1, the weights go to cpu"):
        prepare(*random_layer(), buffer=buffer)


@pytest.mark.gpu
def test_gpu_locks_once_for_all_layers() -> None:
    layers = [random_layer(experts=5, seed=seed) for seed in range(3)]
    with StagingBuffer("cuda") as buffer:
        for layer in layers:
            prepared = prepare(*layer, device="cuda", buffer=buffer, poison=True)
            assert torch.equal(prepared.codes.cpu(), prepare(*layer).codes)
            assert registered_bytes() == buffer.nbytes > 0
    assert registered_bytes() == 0
