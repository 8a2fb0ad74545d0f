"""Holds the device side of every codebook to the registry of trellis-format; its values are tested through decode."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from trellis_format.codebooks import CODEBOOKS, STATES
from trellis_format.errors import FormatValueError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import codebooks
from trellis_kernels.cute.archs import ARCHS, compiling_for
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS
from trellis_kernels.errors import KernelUnsupportedError


def test_every_codebook_has_one_device_side() -> None:
    assert set(codebooks.DEVICE_CODEBOOKS) | set(TABLE_CODEBOOKS) == set(CODEBOOKS)
    assert not set(codebooks.DEVICE_CODEBOOKS) & set(TABLE_CODEBOOKS)
    assert all(codebooks.get_device_codebook(name).name == name for name in codebooks.DEVICE_CODEBOOKS)


def test_unknown_codebook_is_refused() -> None:
    with pytest.raises(FormatValueError, match="hyb"):
        codebooks.get_device_codebook("hyb")


@pytest.mark.parametrize("name", TABLE_CODEBOOKS)
def test_codebooks_with_a_table_are_refused_where_none_is_set_aside(name: str) -> None:
    with pytest.raises(KernelUnsupportedError, match=f"{name} needs a table.*mul1"):
        codebooks.get_device_codebook(name)


@pytest.mark.parametrize("name", codebooks.DEVICE_CODEBOOKS)
def test_all_states_decode_to_the_table(monkeypatch: pytest.MonkeyPatch, numpy_warp, name: str) -> None:
    monkeypatch.setattr(codebooks, "primitives", numpy_warp)
    states = np.arange(STATES, dtype=np.uint32) * np.uint32(0x00010001)
    pairs = codebooks.get_device_codebook(name).decode_pair(states, states[::-1].copy())
    found = pairs.view(np.uint16).reshape(-1, 2)
    table = CODEBOOKS[name].table_for().view(np.uint16)
    np.testing.assert_array_equal(found[:, 0], table)
    np.testing.assert_array_equal(found[:, 1], table[::-1])


@pytest.mark.parametrize("target", [None, *ARCHS])
@pytest.mark.parametrize("name", codebooks.DEVICE_CODEBOOKS)
def test_eight_states_of_every_lane_decode_to_the_table(
    monkeypatch: pytest.MonkeyPatch, numpy_warp, name: str, target: str | None
) -> None:
    monkeypatch.setattr(codebooks, "primitives", numpy_warp)
    law = codebooks.get_device_codebook(name)
    states = np.random.default_rng(8).permutation(STATES).astype(np.uint32).reshape(8, -1, 32)
    hashes = [law.hash(eighth * np.uint32(0x00010001)) for eighth in states]
    with compiling_for(target) if target else nullcontext():
        pairs = law.finish_eight(hashes, np.arange(32))
    found = np.stack([np.ascontiguousarray(pair).view(np.uint16).reshape(-1, 32, 2) for pair in pairs])
    table = CODEBOOKS[name].table_for().view(np.uint16)
    np.testing.assert_array_equal(found.transpose(0, 3, 1, 2).reshape(states.shape), table[states])
