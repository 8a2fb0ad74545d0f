"""Owns the device side of every codebook: from a state, held in both halves of a register, to its weight.

It must not know how states are cut.  Constants come from the classes of trellis-format, joined here by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from cutlass import Uint32

from trellis_format.codebooks import get_codebook
from trellis_format.codebooks.mul1 import BIAS_BITS, BYTE_BASE, SCALE_BITS, Mul1
from trellis_format.codebooks.summed_halves import FIELD_MASK, FIELD_XOR, MCG, ThreeInst
from trellis_kernels.cute import primitives
from trellis_kernels.errors import KernelUnsupportedError

__all__ = ["DEVICE_CODEBOOKS", "DeviceCodebook", "get_device_codebook"]

_TWICE = 1 - (1 << 16)  # inverse of 1 + 2^16 modulo 2^32: (s | s << 16) * (M * _TWICE) = s * M


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

    @abstractmethod
    def finish_pair(self, first: Uint32, second: Uint32) -> Uint32:
        """Two hashes to the exact fp16 pair {weight of first, weight of second}, first in the low half."""

    def decode_pair(self, first: Uint32, second: Uint32) -> Uint32:
        """Two states, each in both halves of its register, to the fp16 pair of their weights."""
        return self.finish_pair(self.hash(first), self.hash(second))


class _SummedHalves(DeviceCodebook):
    """One mask-and-flip and one fp16 addition a weight, and one permute a pair."""

    def finish_pair(self, first: Uint32, second: Uint32) -> Uint32:
        return primitives.add_halves(
            primitives.and_xor(first, FIELD_MASK, FIELD_XOR), primitives.and_xor(second, FIELD_MASK, FIELD_XOR)
        )


class _ThreeInst(_SummedHalves):
    name = ThreeInst.name
    multiplier = ThreeInst.hash_multiplier
    addend = ThreeInst.hash_addend


class _MCG(_SummedHalves):
    name = MCG.name
    multiplier = MCG.hash_multiplier
    addend = MCG.hash_addend


class _Mul1(DeviceCodebook):
    """One byte sum a weight, and one join and one fused multiply-add a pair."""

    name = Mul1.name
    multiplier = Mul1.multiplier
    is_bound_by_logic = False

    def finish_pair(self, first: Uint32, second: Uint32) -> Uint32:
        # both halves' fp16 1024 ride on the first sum, so that joining the second one is a plain addition
        sums = primitives.join_low_halves(
            primitives.dot_ones(first, BYTE_BASE << 16 | BYTE_BASE), primitives.dot_ones(second, 0)
        )
        return primitives.fma_f16x2(sums, SCALE_BITS, BIAS_BITS)


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
