"""Owns the guard of an arena: one run at a time may have its bytes, whichever binding it comes from.

It must not know streams: runs of one arena on several streams are the caller's to order.
"""

from __future__ import annotations

import threading
from types import TracebackType
from weakref import WeakValueDictionary

import torch

from trellis_moe.errors import MoeValueError

__all__ = ["ArenaGuard", "guard_of"]


class ArenaGuard:
    """Held while a run is issued; a second run that begins meanwhile is refused, not made to wait.

    Args:
        first: address of the arena's first byte, for messages.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._owner = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise MoeValueError(
                f"the scratch at byte {self._first} is in use by a run of thread {self._owner!r}; a second run at the "
                "same time needs scratch of its own"
            )
        self._owner = threading.current_thread().name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


_GUARDS: WeakValueDictionary[tuple[torch.device, int], ArenaGuard] = WeakValueDictionary()
_MAKING = threading.Lock()


def guard_of(arena: torch.Tensor) -> ArenaGuard:
    """The one guard of all bindings whose scratch begins at the arena's first byte."""
    place = arena.device, arena.data_ptr()
    with _MAKING:
        guard = _GUARDS.get(place)
        if guard is None:
            guard = _GUARDS[place] = ArenaGuard(place[1])
        return guard
