"""Owns the guard of an arena: one run at a time may have its bytes, and runs on several CUDA streams follow each other.

It must not know what runs.  Bindings of one arena have one guard, and guards whose arenas overlap know each other.
Replays of a CUDA graph are not seen: the caller orders them.
"""

from __future__ import annotations

import threading
from types import TracebackType
from weakref import WeakSet, WeakValueDictionary

import torch

from trellis_moe.errors import MoeValueError

__all__ = ["ArenaGuard", "guard_of"]

_LOCK = threading.Lock()  # of every guard's state: held for a look, never for a run


class ArenaGuard:
    """Held while a run is issued; a second run that begins meanwhile is refused, not made to wait.

    On a CUDA device, a run on another stream than the last run in these bytes waits on the device for what that stream
    was given until now.

    Args:
        device: of the arena.
        span: addresses of its first byte and of the one past its last.
    """

    def __init__(self, device: torch.device, span: tuple[int, int]) -> None:
        self.device = device
        self.span = span
        self.beside: WeakSet[ArenaGuard] = WeakSet()
        self._owner: str | None = None
        self._stream: torch.cuda.Stream | None = None
        self._on_cuda = device.type == "cuda"

    def __enter__(self) -> None:
        with _LOCK:
            for other in (self, *self.beside) if self.beside else (self,):
                if other._owner is not None:
                    raise MoeValueError(
                        f"the scratch at byte {self.span[0]} is in use by a run of thread {other._owner!r}; a second "
                        "run at the same time needs scratch of its own"
                    )
            self._owner = threading.current_thread().name
        if self._on_cuda:
            try:
                self._follow()
            except BaseException:
                self._owner = None
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None

    def _follow(self) -> None:
        """Let the current stream wait for the last ones that ran in these bytes."""
        stream = torch.cuda.current_stream(self.device)
        for other in (self, *self.beside) if self.beside else (self,):
            last = other._stream
            # What a graph captures cannot wait for what it does not, nor the other way round.
            if last is not None and last != stream and _captures(last) == _captures(stream):
                stream.wait_stream(last)
        self._stream = stream


def _captures(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_GUARDS: WeakValueDictionary[tuple[torch.device, int, int], ArenaGuard] = WeakValueDictionary()


def guard_of(arena: torch.Tensor) -> ArenaGuard:
    """The one guard of all bindings of an arena; it knows those of the arenas that overlap it.

    Args:
        arena: `[bytes] uint8`, contiguous.
    """
    first = arena.data_ptr()
    span = (first, first + arena.nbytes)
    with _LOCK:
        guard = _GUARDS.get((arena.device, *span))
        if guard is None:
            guard = ArenaGuard(arena.device, span)
            for other in list(_GUARDS.values()):
                if other.device == guard.device and other.span[0] < span[1] and span[0] < other.span[1]:
                    guard.beside.add(other)
                    other.beside.add(guard)
            _GUARDS[arena.device, *span] = guard
        return guard
