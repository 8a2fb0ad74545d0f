"""Owns how memory that ran out is told from other errors.  It must not know what it was for."""

from __future__ import annotations

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, torch's of a GPU, or torch's of a CPU, which has no type.

    Args:
        error: as it was raised.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # without loading torch
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
