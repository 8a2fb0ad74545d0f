"""Owns the registry of codebooks: the one place that says which exist.  It must not know files or tiles."""

from __future__ import annotations

from trellis_format.codebooks.base import STATES, Codebook, RateCodebook, StateCodebook
from trellis_format.codebooks.lut_e4m3 import LutE4M3
from trellis_format.codebooks.lut_fp16 import LutFp16
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.codebooks.summed_halves import MCG, ThreeInst
from trellis_format.errors import FormatValueError

__all__ = ["CODEBOOKS", "EXL3_CODEBOOKS", "STATES", "Codebook", "RateCodebook", "StateCodebook", "get_codebook"]

_STATE_CODEBOOKS: tuple[StateCodebook, ...] = (ThreeInst(), MCG(), Mul1())
_RATE_CODEBOOKS: tuple[RateCodebook, ...] = (LutE4M3(), LutFp16())

CODEBOOKS: dict[str, Codebook] = {codebook.name: codebook for codebook in (*_STATE_CODEBOOKS, *_RATE_CODEBOOKS)}
"""Every codebook by name."""

EXL3_CODEBOOKS: dict[str, StateCodebook] = {
    codebook.name: codebook for codebook in _STATE_CODEBOOKS if codebook.in_exl3
}
"""Those that EXL3 linears may have, by name."""


def get_codebook(name: str) -> Codebook:
    """The codebook of that name.

    Raises:
        FormatValueError: if there is none; names the known ones.
    """
    try:
        return CODEBOOKS[name]
    except KeyError:
        raise FormatValueError(f"unknown codebook {name!r}; known: {', '.join(CODEBOOKS)}") from None
