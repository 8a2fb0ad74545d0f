"""Owns the registry of codebooks: the one place that says which exist.  It must not know files or tiles."""

from __future__ import annotations

from trellis_format.codebooks.base import STATES, Codebook
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.codebooks.summed_halves import MCG, ThreeInst
from trellis_format.errors import FormatValueError

__all__ = ["CODEBOOKS", "STATES", "Codebook", "get_codebook"]

CODEBOOKS: dict[str, Codebook] = {codebook.name: codebook for codebook in (ThreeInst(), MCG(), Mul1())}
"""Every codebook by name."""


def get_codebook(name: str) -> Codebook:
    """The codebook of that name.

    Raises:
        FormatValueError: if there is none; names the known ones.
    """
    try:
        return CODEBOOKS[name]
    except KeyError:
        raise FormatValueError(f"unknown codebook {name!r}; known: {', '.join(CODEBOOKS)}") from None
