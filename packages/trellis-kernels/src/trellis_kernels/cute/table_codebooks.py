"""Owns the device side of the codebooks whose law needs a table: from a state to its weight through shared memory.

It must not know how states are cut or who fills the table.  Constants come from the classes of trellis-format, joined
here by name.  A state comes twice in its register, `s | s << 16`, and K is known when the code is generated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from cutlass import Int32, Uint32

from trellis_format.codebooks.lut_e4m3 import LutE4M3
from trellis_format.codebooks.lut_fp16 import SEGMENTS, LutFp16
from trellis_format.codebooks.lut_rank import ADDEND, FOLD, MULTIPLIER, ranks_of
from trellis_format.rates import STATE_BITS, Rate
from trellis_kernels.arguments import FULL_TABLE_RATE
from trellis_kernels.cute import primitives

__all__ = ["TABLE_CODEBOOKS", "TableCodebook", "table_codebook"]

_HALF = 1 << STATE_BITS - 1  # ranks below are negative
_SEGMENT_BITS = 3  # eight segments in each power of two
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_KEY_SHIFT = _MANTISSA_BITS - _SEGMENT_BITS
_FIRST_KEY = _EXPONENT_BIAS << _SEGMENT_BITS
_TWO_TO_8 = 0x5C00  # fp16 256
_MINUS_ZERO = 0x8000  # fp16; added to a product it changes nothing, not even the sign of a zero


def _rank(twice: Uint32, rate: Rate) -> Uint32:
    """The rank of a state, in the low half, zeros above; the law is that of `trellis_format.codebooks.lut_rank`.

    Reversed as a 32-bit word, the upper copy of the state has the branch's bits, turned round, where the rank wants
    them; the syndrome gets there by a shift of 16.
    """
    bits = rate.half_bits // 2
    low = (1 << STATE_BITS - bits) - 1
    history = (twice >> bits) & low
    mixed = history ^ (history >> FOLD)
    mixed = mixed ^ ((mixed << FOLD) & low)
    hashed = primitives.multiply_add(mixed, MULTIPLIER, ADDEND)
    return ((primitives.reverse_bits(twice) ^ (hashed >> STATE_BITS)) & (0xFFFF ^ low)) | (hashed & low)


class TableCodebook(ABC):
    """A codebook's law as instructions and a table."""

    name: ClassVar[str]
    """Name, as in `trellis_format.codebooks.CODEBOOKS`."""

    @property
    @abstractmethod
    def words(self) -> npt.NDArray[np.uint32]:
        """`[words] uint32`: the table, a multiple of four words."""

    @abstractmethod
    def decode_pair(self, first: Uint32, second: Uint32, rate: Rate, s_table: Int32) -> Uint32:
        """Two states, each twice in its register, to the fp16 pair of their weights, the first in the low half.

        Args:
            first: a state.
            second: another.
            rate: K.
            s_table: address of the table in shared memory.
        """


class _LutE4M3(TableCodebook):
    """The 4,096 values of T12 as fp16, 8 KiB: widening them when the table is made saves it for every weight."""

    name = LutE4M3.name

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        law = LutE4M3()
        rate = law.legal_rates[0]
        values = np.empty(1 << 12, np.float16)
        states = np.arange(1 << STATE_BITS, dtype=np.uint16)
        values[ranks_of(states, rate) >> 4] = law.evaluate(states, rate)
        return values.view(np.uint32)

    def decode_pair(self, first: Uint32, second: Uint32, rate: Rate, s_table: Int32) -> Uint32:
        low, high = (primitives.load_shared_half(s_table, (_rank(state, rate) >> 4) << 1) for state in (first, second))
        return primitives.join_low_halves(low, high)


class _FullLutE4M3(TableCodebook):
    """The E4M3 byte of every state at K = 2, 64 KiB: no rank, one load, and the widening of a pair.

    A byte's exponent and mantissa, moved to those of fp16, are the value divided by 2^8, subnormal or not.
    """

    name = LutE4M3.name

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        states = np.arange(1 << STATE_BITS, dtype=np.uint16)
        return LutE4M3().evaluate_bytes(states, FULL_TABLE_RATE).view(np.uint32)

    def decode_pair(self, first: Uint32, second: Uint32, _rate: Rate, s_table: Int32) -> Uint32:
        low, high = (primitives.load_shared_byte(s_table, state & 0xFFFF) for state in (first, second))
        pair = primitives.join_low_halves(low, high)
        fields = ((pair << 8) & 0x80008000) | ((pair << 7) & 0x3F803F80)
        return primitives.fma_f16x2(fields, _TWO_TO_8, _MINUS_ZERO)


class _LutFp16(TableCodebook):
    """A segment is found by its float: the exponent and three mantissa bits of an odd integer are its table index.

    So are those of the next segment's start, from which the place within this one is one subtraction.
    """

    name = LutFp16.name

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        table = np.zeros(STATE_BITS << _SEGMENT_BITS, np.uint32)
        for key in range(table.size):
            exponent, sub = divmod(key, 1 << _SEGMENT_BITS)
            if exponent > _SEGMENT_BITS:
                entry = key - (_SEGMENT_BITS << _SEGMENT_BITS)
            else:  # the outermost ranks have a segment each: 1, 3, 5, 7, ..., 15 are entries 0 to 7
                odd = (1 << exponent) + (sub >> _SEGMENT_BITS - exponent)
                entry = odd >> 1
            base, slope = SEGMENTS[entry]
            table[key] = slope << 16 | base
        return table

    def decode_pair(self, first: Uint32, second: Uint32, rate: Rate, s_table: Int32) -> Uint32:
        ranks = [_rank(state, rate) for state in (first, second)]
        low, high = (self._magnitude(rank, s_table) for rank in ranks)
        signs = [(rank & _HALF) ^ _HALF for rank in ranks]
        return primitives.f32_to_f16x2(low, high) ^ (signs[0] | signs[1] << 16)

    @staticmethod
    def _magnitude(rank: Uint32, s_table: Int32) -> Uint32:
        """Bits of the magnitude in float32, not yet rounded to fp16."""
        flip = (rank >> STATE_BITS - 1) - 1  # all ones below the middle
        odd = primitives.float_bits(0xFFFF - (((rank ^ flip) & (_HALF - 1)) << 1))
        key = odd >> _KEY_SHIFT
        segment = primitives.load_shared_word(s_table, (key - _FIRST_KEY) << 2)
        return primitives.evaluate_line(segment, (key + 1) << _KEY_SHIFT, odd)


_FULL_TABLES: dict[str, TableCodebook] = {LutE4M3.name: _FullLutE4M3()}


def table_codebook(name: str, table: str) -> TableCodebook | None:
    """The device side of a codebook with a `compact` or a `full` table; None for one that is arithmetic alone."""
    return _FULL_TABLES[name] if table == "full" else TABLE_CODEBOOKS.get(name)


TABLE_CODEBOOKS: dict[str, TableCodebook] = {codebook.name: codebook for codebook in (_LutE4M3(), _LutFp16())}
"""The device side of every codebook with a table, by name, in its compact form."""
