"""Holds host buffers to their exact size and to one release of what they locked, with CUDA's runtime or a fake one."""

from __future__ import annotations

import errno
import gc
import mmap

import numpy as np
import pytest
import torch

from prep.samples import FakeCudart
from trellis_prep import PrepMemoryError, pinned
from trellis_prep.pinned import HostBuffer, registered_bytes

GPU = torch.device("cuda", 0)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """A fake runtime in the place of CUDA's."""
    fake = FakeCudart()
    monkeypatch.setattr(pinned, "_cudart", lambda: fake)
    monkeypatch.setattr(pinned, "_clear_error", lambda device: None)
    return fake


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 100_001])
def test_size_is_exact_and_the_start_is_a_page(nbytes: int) -> None:
    buffer = HostBuffer(nbytes)
    assert (buffer.nbytes, buffer.array.size, buffer.tensor.numel()) == (nbytes, nbytes, nbytes)
    assert buffer.tensor.data_ptr() % mmap.PAGESIZE == 0
    buffer.array[:] = np.arange(nbytes) % 251
    assert buffer.tensor[-1] == (nbytes - 1) % 251
    assert registered_bytes() == 0
    buffer.close()


def test_exactly_its_bytes_are_locked_until_it_is_closed(cudart: FakeCudart) -> None:
    first, second = HostBuffer(10_000, device=GPU), HostBuffer(77, device=GPU)
    assert cudart.held == {first.tensor.data_ptr(): 10_000, second.tensor.data_ptr(): 77}
    assert registered_bytes() == 10_077
    first.close()
    assert registered_bytes() == 77
    second.close()
    assert (registered_bytes(), cudart.held) == (0, {})


def test_closing_twice_unlocks_once(cudart: FakeCudart) -> None:
    buffer = HostBuffer(5000, device=GPU)
    buffer.close()
    buffer.close()
    assert cudart.held == {}


def test_buffer_that_was_dropped_is_unlocked(cudart: FakeCudart) -> None:
    buffer = HostBuffer(5000, device=GPU)
    assert registered_bytes() == 5000
    del buffer
    gc.collect()
    assert (registered_bytes(), cudart.held) == (0, {})


def test_view_that_outlives_the_buffer_is_harmless(cudart: FakeCudart) -> None:
    buffer = HostBuffer(50_000, device=GPU)
    view = buffer.array[100:200]
    view.fill(7)
    buffer.close()
    assert registered_bytes() == 0
    view.fill(9)
    assert (view == 9).all()


def test_refused_lock_names_the_bytes_and_keeps_nothing(cudart: FakeCudart) -> None:
    cudart.status = 2
    with pytest.raises(PrepMemoryError, match="staging of 5000 bytes cannot be page-locked for cuda:0: CUDA error 2"):
        HostBuffer(5000, device=GPU)
    assert registered_bytes() == 0


def test_memory_that_cannot_be_mapped_names_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pinned.mmap, "mmap", refuse)
    with pytest.raises(PrepMemoryError, match=r"staging of 4096 bytes cannot be had on the host: .*allocate memory"):
        HostBuffer(4096)


@pytest.mark.gpu
def test_torch_takes_the_buffer_for_pinned_memory() -> None:
    buffer = HostBuffer(100_000, device=GPU)
    assert buffer.tensor.is_pinned()
    assert registered_bytes() == 100_000
    buffer.array[:] = np.arange(100_000) % 251
    copy = buffer.tensor.to(GPU, non_blocking=True)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(copy.cpu().numpy(), buffer.array)
    buffer.close()
    assert registered_bytes() == 0


@pytest.mark.gpu
def test_refused_lock_is_not_blamed_on_the_next_launch() -> None:
    buffer = HostBuffer(8192, device=GPU)
    with pytest.raises(PrepMemoryError, match="cannot be page-locked"):
        pinned._register(buffer.tensor.data_ptr(), 8192, GPU)  # locked already
    assert torch.ones(3, device=GPU).sum().item() == 3
    buffer.close()
