"""Owns what a running layer tells of itself: the package's logger, and named ranges for profilers.

It must not know launches.  Nothing is printed: the logger has no handler but the caller's.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager

import torch

__all__ = ["LOG", "profile_range"]

LOG = logging.getLogger("trellis_moe")
"""The logger of this package."""

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def profile_range(name: str, device: torch.device) -> AbstractContextManager[None]:
    """A range that NVTX profilers show, where the device is a GPU; else nothing.

    Args:
        name: of the range.
        device: where the launch runs.
    """
    if device.type != "cuda":
        return _NOTHING
    marked: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
    return marked
