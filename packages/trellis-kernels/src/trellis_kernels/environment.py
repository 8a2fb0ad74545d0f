"""Owns every environment variable that this package reads, each once.  It must not know what they are for.

TRELLIS_KERNELS_CACHE  folder of compiled kernels, or `off`; default `trellis-kernels` in the user's cache folder
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder"]

CACHE_VARIABLE = "TRELLIS_KERNELS_CACHE"
"""Name of the variable that moves the cache of compiled kernels, or turns it off."""


@lru_cache
def cache_folder() -> Path | None:
    """Folder of the cache of compiled kernels; None if it is turned off."""
    given = os.environ.get(CACHE_VARIABLE, "")
    if given.lower() == "off":
        return None
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "trellis-kernels"
