"""Owns what every codebook has in common: a law from a 16-bit state to a value, and the rates it is legal for.

It must not know any particular codebook, nor how states are cut from a bit ring.  The law of a `StateCodebook` reads
the state alone, so one table serves every rate; that of a `RateCodebook` reads K as well and has a table for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import Rate

__all__ = ["STATES", "Codebook", "RateCodebook", "StateCodebook"]

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
    in_exl3: ClassVar[bool]
    """Whether EXL3 linears may have it; the others occur in slot-major containers alone."""
    marker: ClassVar[str | None] = None
    """Suffix of the marker tensor in EXL3 files, or None."""
    multiplier: ClassVar[int | None] = None
    """uint32 value of the marker tensor, or None."""

    @abstractmethod
    def table_for(self, rate: Rate | None = None) -> npt.NDArray[np.float16]:
        """`[65536] float16`: the weight of every state of a tile of K = `rate`, read-only.

        Raises:
            FormatTypeError: if no rate is given and the law depends on it.
            FormatValueError: if K is not legal for the codebook.
        """

    def decode(self, states: npt.NDArray[np.uint16], rate: Rate | None = None) -> npt.NDArray[np.float16]:
        """The weights of many states, by table: `[...] uint16` to `[...] float16`; raises as `table_for`."""
        return self.table_for(rate)[states]

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


class StateCodebook(Codebook):
    """A codebook whose law reads the state alone."""

    @abstractmethod
    def value(self, state: int) -> float:
        """The weight of one state: int in [0, 65536) to a float that fp16 holds exactly."""

    @abstractmethod
    def evaluate(self, states: npt.NDArray[np.uint16]) -> npt.NDArray[np.float16]:
        """The weights of many states, by arithmetic: `[...] uint16` to `[...] float16`."""

    @cached_property
    def table(self) -> npt.NDArray[np.float16]:
        """`[65536] float16`: the weight of every state, read-only."""
        return _frozen(self.evaluate(_all_states()))

    def table_for(self, rate: Rate | None = None) -> npt.NDArray[np.float16]:
        """`[65536] float16`: the weight of every state, the same at every K; see `Codebook.table_for`."""
        if rate is not None:
            self.check_rate(rate)
        return self.table


class RateCodebook(Codebook):
    """A codebook whose law reads the state and K."""

    @abstractmethod
    def value(self, state: int, rate: Rate) -> float:
        """The weight of one state at K: int in [0, 65536) to a float that fp16 holds exactly."""

    @abstractmethod
    def evaluate(self, states: npt.NDArray[np.uint16], rate: Rate) -> npt.NDArray[np.float16]:
        """The weights of many states at K, by arithmetic: `[...] uint16` to `[...] float16`."""

    @cached_property
    def tables(self) -> dict[Rate, npt.NDArray[np.float16]]:
        """The table of every legal K, `[65536] float16` each, read-only."""
        return {rate: _frozen(self.evaluate(_all_states(), rate)) for rate in self.legal_rates}

    def table_for(self, rate: Rate | None = None) -> npt.NDArray[np.float16]:
        """`[65536] float16`: the weight of every state at K; see `Codebook.table_for`."""
        if rate is None:
            raise FormatTypeError(f"codebook {self.name} has a table for each K; give the rate")
        self.check_rate(rate)
        return self.tables[rate]


def _all_states() -> npt.NDArray[np.uint16]:
    return np.arange(STATES, dtype=np.uint16)


def _frozen(table: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    table.setflags(write=False)
    return table
