"""Owns the table of rates of one layer: K per expert and projection, in its shortest form.

It must not know codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rate_bytes import pack_rates, symmetric_rate
from trellis_format.rates import Rate

__all__ = ["RateTable"]


@dataclass(frozen=True)
class RateTable:
    """K of every expert and projection.

    Args:
        half_bits: rows of integers 2K.  One row of one column is uniform; `experts` rows of one column vary per
            expert; otherwise `experts` (or one) rows of one column per projection.

    Raises:
        FormatTypeError: if the table is not a tuple of tuples of ints.
        FormatValueError: if it is empty or ragged, or a rate is not legal.
    """

    half_bits: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.half_bits, tuple) or not all(isinstance(row, tuple) for row in self.half_bits):
            raise FormatTypeError("half_bits must be a tuple of tuples of ints")
        if not self.half_bits or not self.half_bits[0] or len({len(row) for row in self.half_bits}) != 1:
            raise FormatValueError("a rate table needs at least one row, and rows of one length")
        for value in {value for row in self.half_bits for value in row}:
            Rate(value)

    @classmethod
    def uniform(cls, rate: Rate) -> RateTable:
        """The table of a layer with one rate."""
        return cls(((rate.half_bits,),))

    @classmethod
    def of(cls, rates: Sequence[Sequence[Rate]]) -> RateTable:
        """The shortest table of `[experts][projections]` rates."""
        rows = tuple(tuple(rate.half_bits for rate in row) for row in rates)
        if rows and all(len(set(row)) == 1 for row in rows):
            rows = tuple(row[:1] for row in rows)
        if len(set(rows)) == 1:
            rows = rows[:1]
        return cls(rows)

    @classmethod
    def from_bytes(cls, rate: npt.NDArray[np.uint8]) -> RateTable:
        """The shortest table that a tensor of symmetric rate bytes states; the inverse of `rate_bytes`.

        Args:
            rate: `[1]`, `[experts]` or `[experts, projections] uint8`.

        Raises:
            FormatTypeError: if it is not uint8.
            FormatValueError: if it has another number of axes or no element, or a byte is illegal or asymmetric; names
                its place.
        """
        if rate.dtype != np.uint8:
            raise FormatTypeError(f"rate must be uint8, got {rate.dtype}")
        if rate.ndim not in (1, 2) or not rate.size:
            raise FormatValueError(
                f"rate must be [1], [experts] or [experts, projections], got shape {list(rate.shape)}"
            )
        known: dict[int, Rate] = {}
        for byte in np.unique(rate).tolist():
            try:
                known[byte] = symmetric_rate(byte)
            except FormatValueError as error:
                place = [int(index) for index in np.argwhere(rate == byte)[0]]
                raise FormatValueError(f"rate{place}: {error.message}") from error
        rows = rate if rate.ndim == 2 else rate[:, None]
        return cls.of([[known[byte] for byte in row] for row in rows.tolist()])

    @property
    def is_uniform(self) -> bool:
        """Whether the layer has one rate."""
        return len(self.half_bits) == 1 and len(self.half_bits[0]) == 1

    def rate(self, expert: int, projection: int) -> Rate:
        """K of one expert's linear; both arguments are indices."""
        return Rate(self.half_bits_of(expert, projection))

    def half_bits_of(self, expert: int, projection: int) -> int:
        """2K of one expert's linear; both arguments are indices."""
        row = self.half_bits[expert if len(self.half_bits) > 1 else 0]
        return row[projection if len(row) > 1 else 0]

    def distinct(self) -> tuple[Rate, ...]:
        """The rates that occur, ascending."""
        return tuple(Rate(value) for value in sorted({value for row in self.half_bits for value in row}))

    def check_shape(self, num_experts: int, num_projections: int) -> None:
        """Accept a table that fits a layer.

        Raises:
            FormatValueError: if it has neither one nor `num_experts` rows, or neither one nor `num_projections`
                columns.
        """
        rows, columns = len(self.half_bits), len(self.half_bits[0])
        if rows not in (1, num_experts) or columns not in (1, num_projections):
            raise FormatValueError(
                f"rate table of {rows} x {columns} does not fit {num_experts} experts x {num_projections} projections"
            )

    def rate_bytes(self) -> npt.NDArray[np.uint8]:
        """`[1]`, `[experts]` or `[rows, projections] uint8`: symmetric rate bytes, the nibble twice."""
        table = np.array(
            [[pack_rates(Rate(value), Rate(value)) for value in row] for row in self.half_bits], dtype=np.uint8
        )
        return table[:, 0] if table.shape[1] == 1 else table
