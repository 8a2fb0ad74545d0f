"""Holds the few-token kernels that are compiled ahead of time to what they stand for."""

from __future__ import annotations

import pytest

from trellis_format.codebooks import CODEBOOKS
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.moe_key import PRODUCT_ROWS
from trellis_kernels.cute.moe_registry import moe_small_keys
from trellis_kernels.cute.registry import registered_keys
from trellis_kernels.errors import KernelValueError


@pytest.mark.parametrize("arch", ARCHS)
def test_every_codebook_arithmetic_and_form_is_there(arch: str) -> None:
    keys = moe_small_keys(arch)
    assert {key.codebook for key in keys} == set(CODEBOOKS)
    assert {key.arithmetic for key in keys} == set(PRODUCT_ROWS)
    assert {key.direct for key in keys} == {False, True}
    assert {key.row_columns for key in keys} == {1, 2}
    assert {key.arch for key in keys} == {arch}
    assert set(keys) <= set(registered_keys(arch))


def test_names_tell_keys_apart() -> None:
    keys = moe_small_keys("sm_90a")
    assert len({str(key) for key in keys}) == len(set(keys)) == len(keys)


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(KernelValueError, match="sm_70"):
        moe_small_keys("sm_70")
