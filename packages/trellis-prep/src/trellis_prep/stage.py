"""Owns the host memory that preparations of several layers pass through one after another.  It must not move bytes.

Locking pages takes longer than filling them, so whoever prepares many layers keeps one buffer for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch

from trellis_prep.devices import resolve_device
from trellis_prep.errors import PrepStateError
from trellis_prep.pinned import HostBuffer

__all__ = ["StagingBuffer"]


class StagingBuffer:
    """Host memory for the slots of preparations to one device.  Use it as a context: leaving frees it.

    It takes memory when a preparation first needs some, as much as that one plans; a later one that needs more, or
    whose bound is below what there is, exchanges it.  It serves one preparation at a time.

    Args:
        device: destination, as in `prepare`.

    Raises:
        PrepTypeError, PrepValueError: if it is not a device that can be used.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = resolve_device(device)
        self._buffer: HostBuffer | None = None
        self._lent = self._closed = False

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @contextlib.contextmanager
    def lend(self, nbytes: int, max_bytes: int) -> Iterator[HostBuffer]:
        """Lend memory of at least `nbytes` and at most `max_bytes` bytes to one preparation.

        Raises:
            PrepStateError: if it is lent to another one, or closed.
            PrepMemoryError: if the memory cannot be had.
        """
        if self._lent or self._closed:
            raise PrepStateError(
                "a staging buffer serves one preparation at a time; this one "
                + ("is closed" if self._closed else "is lent to another one; take a second buffer")
            )
        self._lent = True
        try:
            if self._buffer is None or not nbytes <= self._buffer.nbytes <= max_bytes:
                self._free()
                self._buffer = HostBuffer(nbytes, device=self.device if self.device.type == "cuda" else None)
            yield self._buffer
        finally:
            self._lent = False

    def close(self) -> None:
        """Free the memory.

        Raises:
            PrepStateError: if it is lent.
        """
        if self._lent:
            raise PrepStateError("a staging buffer cannot be closed while a preparation uses it")
        self._closed = True
        self._free()

    def _free(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()
