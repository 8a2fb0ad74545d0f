"""Owns every environment variable that this package reads, each once.  It must not know what they are for.

TRELLIS_REFERENCE  `1` plans every op on the torch backend, exact and slow, on any device; default `0`
"""

from __future__ import annotations

import os
from functools import lru_cache

from trellis_moe.errors import MoeValueError

__all__ = ["REFERENCE_VARIABLE", "reference_asked"]

REFERENCE_VARIABLE = "TRELLIS_REFERENCE"
"""Name of the variable that asks for the torch backend."""


@lru_cache
def reference_asked() -> bool:
    """Whether the environment asks for the torch backend.

    Raises:
        MoeValueError: if the variable is neither 0 nor 1.
    """
    given = os.environ.get(REFERENCE_VARIABLE, "0")
    if given not in ("", "0", "1"):
        raise MoeValueError(f"{REFERENCE_VARIABLE} must be 0 or 1, got {given!r}")
    return given == "1"
