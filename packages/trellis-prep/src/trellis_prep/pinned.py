"""Owns host memory of an exact size, page-locked for the device where asked.  It must not know what passes through it.

torch's pinned allocator rounds a request up to a power of two and keeps it, which would break a bound by up to twice
its bytes; here pages are mapped, registered with CUDA, and given back when the buffer is closed.  The operating system
maps whole pages, so a buffer whose size is not a multiple of a page ends inside its last one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trellis_prep.errors import PrepMemoryError

__all__ = ["HostBuffer", "registered_bytes"]

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process
_registered: dict[int, int] = {}
_lock = threading.Lock()


def registered_bytes() -> int:
    """Bytes that this process has page-locked through this module."""
    with _lock:
        return sum(_registered.values())


class HostBuffer:
    """Page-aligned host memory of exactly `nbytes`.

    A view that outlives `close` reads and writes ordinary memory of the process, never memory of someone else.

    Args:
        nbytes: size, at least 1.
        device: CUDA device to page-lock it for, or None.

    Raises:
        PrepMemoryError: if the memory cannot be mapped or page-locked; names the bytes.
    """

    def __init__(self, nbytes: int, *, device: torch.device | None = None) -> None:
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._mapping = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise PrepMemoryError(f"staging of {nbytes} bytes cannot be had on the host: {error}") from error
        with contextlib.suppress(OSError):  # a wish: large pages are locked faster
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.array)
        self._unregister: weakref.finalize[..., Any] | None = None
        if device is not None:
            address = self.tensor.data_ptr()
            self._unregister = weakref.finalize(self, _unregister, address)  # first, so that no interrupt comes between
            self._unregister.atexit = False  # a process that ends takes its registrations with it
            _register(address, nbytes, device)

    def close(self) -> None:
        """Unlock and unmap; every copy from the buffer must have completed."""
        if self._unregister is not None:
            self._unregister()
        self.array = np.empty(0, dtype=np.uint8)
        self.tensor = torch.empty(0, dtype=torch.uint8)
        try:
            self._mapping.close()
        except BufferError:  # a view is still held: its pages go now, their addresses with the view
            with contextlib.suppress(ValueError, OSError):
                self._mapping.madvise(mmap.MADV_DONTNEED)


def _register(address: int, nbytes: int, device: torch.device) -> None:
    status = int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
    if status:
        _clear_error(device)
        raise PrepMemoryError(
            f"staging of {nbytes} bytes cannot be page-locked for {device}: CUDA error {status}; a smaller max_bytes "
            "or a higher limit on locked memory may help"
        )
    with _lock:
        _registered[address] = nbytes


def _unregister(address: int) -> None:
    with _lock:
        known = _registered.pop(address, None)
    if known is not None:
        # Its status is dropped: it repeats an error of the context, which whoever waited for the copies has reported.
        _cudart().cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """Let a launch collect the error code that the runtime keeps, so that no later launch is blamed for it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own
