"""Owns copies to a GPU through CUDA's driver, issued to a stream.  It must not know slots, nor what bytes mean."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

__all__ = ["DriverStream"]

_LIBRARY = "libcuda.so.1"


class DriverStream:
    """A stream of the driver, which is one of torch's.

    Args:
        library: the driver.
        stream: handle.

    Raises:
        RuntimeError: if the driver does not know the stream.
    """

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library, self._stream, self._context = library, stream, ctypes.c_void_p()
        self._issue = library.cuMemcpyHtoDAsync_v2
        self._check(library.cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(self._context)))

    @classmethod
    def of(cls, stream: int) -> DriverStream | None:
        """The stream of a handle; None where the driver is not found, as off Linux, or does not know it."""
        if (library := _library()) is not None:
            with contextlib.suppress(RuntimeError):
                return cls(library, stream)
        return None

    def enter(self) -> None:
        """Make the stream's context the calling thread's.

        Raises:
            RuntimeError: if the driver refuses.
        """
        self._check(self._library.cuCtxSetCurrent(self._context))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Issue a copy from the host, in a thread that has entered.

        Args:
            target: address on the device.
            source: address on the host, page-locked.
            nbytes: bytes, which must stay there until the copy has completed.

        Raises:
            RuntimeError: if the driver refuses.
        """
        if status := self._issue(target, source, nbytes, self._stream):
            self._check(status)

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} ({status})")


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        for name in ("cuStreamGetCtx", "cuCtxSetCurrent", "cuGetErrorString"):
            getattr(library, name)
    except (OSError, AttributeError):
        return None
    return library
