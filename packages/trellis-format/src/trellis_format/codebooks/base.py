"""Owns what every codebook has in common: a law from a 16-bit state to a value, and the rates it is legal for.

It must not know any particular codebook, nor how states are cut from a bit ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate

__all__ = ["STATES", "Codebook"]

STATES = 1 << 16
"""Number of trellis states."""


class Codebook(ABC):
    """A law that turns a 16-bit trellis state into a weight.

    A subclass states its constants, its legal rates, the scalar law as one would write it on paper (`value`), and the
    same law over numpy arrays (`evaluate`).  Tests hold the two together over all 65,536 states.
    """

    name: ClassVar[str]
    """Name in configurations and reports."""
    legal_rates: ClassVar[tuple[Rate, ...]]
    """Rates that files of this codebook may have."""
    marker: ClassVar[str | None] = None
    """Suffix of the marker tensor in EXL3 files, or None."""
    multiplier: ClassVar[int | None] = None
    """uint32 value of the marker tensor, or None."""

    @abstractmethod
    def value(self, state: int) -> float:
        """The weight of one state: int in [0, 65536) to a float that fp16 holds exactly."""

    @abstractmethod
    def evaluate(self, states: npt.NDArray[np.uint16]) -> npt.NDArray[np.float16]:
        """The weights of many states, by arithmetic: `[...] uint16` to `[...] float16`."""

    @cached_property
    def table(self) -> npt.NDArray[np.float16]:
        """`[65536] float16`: the weight of every state, read-only."""
        table = self.evaluate(np.arange(STATES, dtype=np.uint16))
        table.setflags(write=False)
        return table

    def decode(self, states: npt.NDArray[np.uint16]) -> npt.NDArray[np.float16]:
        """The weights of many states, by table: `[...] uint16` to `[...] float16`."""
        return self.table[states]

    def check_rate(self, rate: Rate) -> None:
        """Accept a rate that this codebook is defined for.

        Raises:
            FormatValueError: if the rate is not among `legal_rates`; names the codebook, K and the legal K.
        """
        if rate not in self.legal_rates:
            legal = ", ".join(str(legal) for legal in self.legal_rates)
            hint = "; half rates need the mul1 codebook" if rate.is_half else ""
            kind = "half rate K" if rate.is_half else "K"
            raise FormatValueError(f"codebook {self.name} has no {kind} = {rate}; legal K: {legal}{hint}")
