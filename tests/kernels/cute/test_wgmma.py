"""Holds the descriptor of a B tile to its bit fields."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import wgmma


@pytest.mark.parametrize("address", [0, 1024, 37 * 1024, 226 * 1024])
def test_descriptor_holds_the_address_in_units_of_sixteen_bytes(address: int) -> None:
    word = wgmma.descriptor_word(np.int64(address))
    assert word & 0x3FFF == address // 16
    assert word >> 16 == 1
    assert word >> 14 & 3 == 0


def test_upper_word_has_the_group_pitch_and_the_swizzle() -> None:
    high = wgmma._DESCRIPTOR_HIGH
    assert high & 0x3FFF == 8 * 128 // 16, "eight rows of 128 bytes"
    assert high >> 30 == 1, "128-byte swizzle"
    assert high >> 14 & 0xFFFF == 0
