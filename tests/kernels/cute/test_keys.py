"""Holds compile keys to what they promise: every field counts, a repr evaluates back, and illegal ones do not exist."""

from __future__ import annotations

import dataclasses

import pytest

from trellis_format.codebooks import CODEBOOKS
from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.keys import VALUE_BYTES, DecodeKey
from trellis_kernels.cute.registry import WITHOUT_DEVICE_DECODE, decode_keys, registered_keys
from trellis_kernels.errors import KernelValueError

KEY = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=6, out_dtype="float16")
OTHERS = {"arch": "sm_80", "codebook": "mcg", "half_bits": 7, "out_dtype": "bfloat16"}


def test_every_field_changes_the_key() -> None:
    assert OTHERS.keys() == {field.name for field in dataclasses.fields(KEY)}
    changed = {dataclasses.replace(KEY, **{name: value}) for name, value in OTHERS.items()}
    assert len(changed | {KEY}) == len(OTHERS) + 1
    assert len({str(key) for key in changed | {KEY}}) == len(OTHERS) + 1


def test_repr_evaluates_back() -> None:
    assert eval(repr(KEY)) == KEY
    assert KEY.rate == Rate.of(3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"arch": "sm_90"}, KernelValueError, "sm_90'.*sm_90a"),
        ({"codebook": "hyb"}, FormatValueError, "hyb.*mul1"),
        ({"codebook": "mcg", "half_bits": 5}, FormatValueError, r"mcg.*2\.5.*mul1"),
        ({"half_bits": 18}, FormatValueError, "9 is not legal"),
        ({"out_dtype": "float64"}, KernelValueError, "float64.*bfloat16"),
    ],
)
def test_illegal_keys_are_refused(change: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        dataclasses.replace(KEY, **change)


@pytest.mark.parametrize("arch", ARCHS)
def test_registry_has_every_codebook_rate_and_dtype_once(arch: str) -> None:
    keys = decode_keys(arch)
    wanted = {
        (arch, codebook.name, rate.half_bits, dtype)
        for codebook in CODEBOOKS.values()
        if codebook.name not in WITHOUT_DEVICE_DECODE
        for rate in codebook.legal_rates
        for dtype in VALUE_BYTES
    }
    assert len(keys) == len(wanted) == 27 * 3
    assert {dataclasses.astuple(key) for key in keys} == wanted
    assert set(keys) <= set(registered_keys(arch))


def test_unknown_target_has_no_registry() -> None:
    with pytest.raises(KernelValueError, match="sm_70"):
        registered_keys("sm_70")
