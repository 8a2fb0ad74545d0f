"""Owns the pause of Python's cycle collector while many objects are made that live on.  It must not know what they are.

Opening a large checkpoint makes a million objects without a cycle among them.  The collector runs whenever enough were
made and walks all of them each time, which took a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Leave the cycle collector off while a block runs, or a function that this decorates; nests."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
