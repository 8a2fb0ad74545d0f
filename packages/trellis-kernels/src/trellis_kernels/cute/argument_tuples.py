"""Owns the arguments of a launch as one tuple that host function, kernels and callers share.

It must not know any kernel.  A module states them once, as a `NamedTuple` whose annotations are numbers of the DSL; the
compiled function takes them as so many numbers in that order, and the stream after them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

import torch

__all__ = ["blank", "kinds", "number"]

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])


@lru_cache
def kinds(arguments: type[tuple[Any, ...]]) -> dict[str, Any]:
    """The DSL's number for each field, in order."""
    return get_type_hints(arguments)


def blank(arguments: type[Arguments]) -> Arguments:
    """Arguments to compile with, or to write over."""
    return arguments(*(kind(0) for kind in kinds(arguments).values()))


def number(value: torch.Tensor | int | float | None) -> int | float:
    """What stands for a value: the address of a tensor, 0 for None."""
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
