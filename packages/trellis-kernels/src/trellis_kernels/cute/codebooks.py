"""Owns the device side of every codebook: from a state, held in both halves of a register, to its weight.

It must not know how states are cut.  Constants come from the classes of trellis-format, joined here by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from cutlass import Int32, Uint32

from trellis_format.codebooks import get_codebook
from trellis_format.codebooks.mul1 import BIAS_BITS, BYTE_BASE, SCALE_BITS, Mul1
from trellis_format.codebooks.summed_halves import FIELD_MASK, FIELD_XOR, MCG, ThreeInst
from trellis_kernels.cute import primitives
from trellis_kernels.cute.archs import current_target
from trellis_kernels.errors import KernelUnsupportedError

__all__ = ["DEVICE_CODEBOOKS", "DeviceCodebook", "get_device_codebook"]

_TWICE = 1 - (1 << 16)  # inverse of 1 + 2^16 modulo 2^32: (s | s << 16) * (M * _TWICE) = s * M


def _half(bits: int) -> float:
    return float(np.array(bits, np.uint16).view(np.float16))


def _bits(value: float) -> int:
    """Of a number that fp16 holds exactly."""
    half = np.float16(value)
    assert float(half) == value
    return int(half.view(np.uint16))


class DeviceCodebook(ABC):
    """A codebook's law as instructions."""

    name: ClassVar[str]
    """Name, as in `trellis_format.codebooks.CODEBOOKS`."""
    multiplier: ClassVar[int]
    """Factor M of the hash x = s * M + A modulo 2^32."""
    addend: ClassVar[int] = 0
    """Term A of the hash."""
    is_bound_by_logic: ClassVar[bool] = True
    """Whether permutes, shifts and logic bind the decoding rather than multiplications."""
    is_split: ClassVar[bool] = False
    """Whether a weight before its last rounding is two fp16 values, whose sum it is."""
    unrounded_scale: ClassVar[float] = 1.0
    """A weight before its last rounding is `unrounded_scale * (value + unrounded_offset)`."""
    unrounded_offset: ClassVar[float] = 0.0

    def hash(self, twice: Uint32) -> Uint32:
        """The hash x of a state s, given as `s | s << 16`."""
        return primitives.multiply_add(twice, self.multiplier * _TWICE, self.addend)

    def hash_below(self, word: Uint32, above: Uint32) -> Uint32:
        """The hash of the state in the low half of a register, given the hash of the state in its upper half.

        word * M + A has that state's s * M in the upper half too, 16 bits up: (above - A) * 2^16.
        """
        addend = self.addend * (1 + (1 << 16)) & 0xFFFFFFFF
        plain = primitives.multiply_add(word, self.multiplier, addend)
        return primitives.multiply_add_word(above, -(1 << 16), plain)

    def hash_half(self, word: Uint32, half: int) -> Uint32:
        """The hash of the state in the low (0) or the upper (1) half of a register."""
        return primitives.multiply_add(primitives.take_half(word, half), self.multiplier, self.addend)

    @abstractmethod
    def finish_pair(self, first: Uint32, second: Uint32) -> Uint32:
        """Two hashes to the exact fp16 pair {weight of first, weight of second}, first in the low half."""

    @abstractmethod
    def unrounded_eight(self, hashes: Sequence[Uint32], lane: Int32) -> list[list[Uint32]]:
        """Eight hashes to exact fp16 values whose affine image is the weight before its last rounding.

        For weights 0 and 1, 2 and 3, 4 and 5, 6 and 7: one pair of values; or where a weight is split, the two values
        of the first, then of the second.  All lanes of a warp must take part, each with its number.
        """

    @abstractmethod
    def _finish_by_products(self, fours: list[list[Uint32]], lane: Int32) -> list[list[Uint32]]:
        """Fours of hashes to the pairs of their hashes 0 and 1, and 2 and 3, by products of the whole warp."""

    def finish_eight(self, hashes: Sequence[Uint32], lane: Int32) -> list[Uint32]:
        """Eight hashes to the exact fp16 pairs of weights 0 and 1, 2 and 3, 4 and 5, 6 and 7.

        All lanes of a warp must take part, each with its number.  Where the target's products round once, they add,
        round and join in place of instructions of the lane.
        """
        target = current_target()
        if target is None or not target.rounds_products_once:
            return [self.finish_pair(hashes[first], hashes[first + 1]) for first in range(0, 8, 2)]
        # pairs 0 and 2 come from one product, 1 and 3 from the next: the order of registers in operand A of a GEMM
        fours = [[hashes[first + index] for index in (0, 1, 4, 5)] for first in (0, 2)]
        even, odd = self._finish_by_products(fours, lane)
        return [even[0], odd[0], even[1], odd[1]]

    def decode_pair(self, first: Uint32, second: Uint32) -> Uint32:
        """Two states, each in both halves of its register, to the fp16 pair of their weights."""
        return self.finish_pair(self.hash(first), self.hash(second))


class _SummedHalves(DeviceCodebook):
    """One mask-and-flip and one fp16 addition a weight, and one permute a pair.

    A product with ones does the additions and the joining of four weights.
    """

    is_split = True

    def finish_pair(self, first: Uint32, second: Uint32) -> Uint32:
        return primitives.add_halves(
            primitives.and_xor(first, FIELD_MASK, FIELD_XOR), primitives.and_xor(second, FIELD_MASK, FIELD_XOR)
        )

    def unrounded_eight(self, hashes: Sequence[Uint32], _lane: Int32) -> list[list[Uint32]]:
        values = [primitives.and_xor(hashed, FIELD_MASK, FIELD_XOR) for hashed in hashes]
        return [values[first : first + 2] for first in range(0, 8, 2)]

    def _finish_by_products(self, fours: list[list[Uint32]], lane: Int32) -> list[list[Uint32]]:
        ones = primitives.own_columns(lane, _bits(1.0) * 0x00010001)
        masked = [[primitives.and_xor(four[index], FIELD_MASK, FIELD_XOR) for index in (0, 2, 1, 3)] for four in fours]
        return [primitives.multiply_halves_to_halves(four, ones, 0) for four in masked]


class _ThreeInst(_SummedHalves):
    name = ThreeInst.name
    multiplier = ThreeInst.hash_multiplier
    addend = ThreeInst.hash_addend


class _MCG(_SummedHalves):
    name = MCG.name
    multiplier = MCG.hash_multiplier
    addend = MCG.hash_addend


class _Mul1(DeviceCodebook):
    """One byte sum a weight, and one join and one fused multiply-add a pair.

    Twice a byte sum S as the bits of an fp16 is 2 S * 2^-24, also where that is normal.  So a product of four weights'
    2 S with a multiple of the scale, plus the bias, is the law without its 1024, and joins them.  The bias as an input
    of the product, beside the sums, spares two registers and costs 2 to 6% of the weights a second.
    """

    name = Mul1.name
    multiplier = Mul1.multiplier
    is_bound_by_logic = False
    unrounded_scale = _half(SCALE_BITS) * 2.0**24  # a byte sum as fp16 bits is that many times 2^-24
    unrounded_offset = (1024.0 + _half(BIAS_BITS) / _half(SCALE_BITS)) * 2.0**-24  # the law's bias is for 1024 + sum

    def finish_pair(self, first: Uint32, second: Uint32) -> Uint32:
        # both halves' fp16 1024 ride on the first sum, so that joining the second one is a plain addition
        sums = primitives.join_low_halves(
            primitives.dot_ones(first, BYTE_BASE << 16 | BYTE_BASE), primitives.dot_ones(second, 0)
        )
        return primitives.fma_f16x2(sums, SCALE_BITS, BIAS_BITS)

    def unrounded_eight(self, hashes: Sequence[Uint32], lane: Int32) -> list[list[Uint32]]:
        ones = primitives.own_columns(lane, 0x01010101)
        pairs = {}
        for first in (0, 2):
            sums = primitives.multiply_bytes_plain([hashes[first + index] for index in (0, 1, 4, 5)], ones)
            for place, (low, high) in ((first, (0, 2)), (first + 4, (1, 3))):
                pairs[place] = [primitives.join_low_halves(sums[low], sums[high])]
        return [pairs[place] for place in range(0, 8, 2)]

    def _finish_by_products(self, fours: list[list[Uint32]], lane: Int32) -> list[list[Uint32]]:
        scale, bias = _bits(_half(SCALE_BITS) * 2.0**23), _bits(1024.0 * _half(SCALE_BITS) + _half(BIAS_BITS))
        scales = primitives.own_columns(lane, scale)
        doubled = [[primitives.dot_ones(four[index], 0, factor=2) for index in (0, 2, 1, 3)] for four in fours]
        return [primitives.multiply_halves_to_halves(four, scales, bias) for four in doubled]


DEVICE_CODEBOOKS: dict[str, DeviceCodebook] = {codebook.name: codebook for codebook in (_ThreeInst(), _MCG(), _Mul1())}
"""The device side of every codebook that is arithmetic alone, by name; `table_codebooks` has the others."""


def get_device_codebook(name: str) -> DeviceCodebook:
    """The device side of a codebook that is arithmetic alone.

    Raises:
        FormatValueError: if there is no such codebook.
        KernelUnsupportedError: if its law needs a table, which takes shared memory that the caller does not set aside.
    """
    known = get_codebook(name).name
    if known not in DEVICE_CODEBOOKS:
        raise KernelUnsupportedError(
            f"codebook {known} needs a table in shared memory, which only the decode op sets aside; "
            f"without one: {', '.join(DEVICE_CODEBOOKS)}"
        )
    return DEVICE_CODEBOOKS[known]
