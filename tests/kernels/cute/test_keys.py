"""Holds compile keys to what they promise: every field counts, a repr evaluates back, and illegal ones do not exist."""

from __future__ import annotations

import dataclasses

import pytest

from trellis_format.codebooks import CODEBOOKS
from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.keys import VALUE_BYTES, DecodeKey
from trellis_kernels.cute.registry import decode_keys, registered_keys
from trellis_kernels.errors import KernelValueError

KEY = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=6, out_dtype="float16")
OTHERS = {"arch": "sm_80", "codebook": "mcg", "half_bits": 7, "out_dtype": "bfloat16"}
TABLED = DecodeKey(arch="sm_90a", codebook="lut_e4m3", half_bits=4, out_dtype="float16")


def test_every_field_changes_the_key() -> None:
    assert OTHERS.keys() == {field.name for field in dataclasses.fields(KEY)} - {"table"}
    changed = {dataclasses.replace(KEY, **{name: value}) for name, value in OTHERS.items()}
    assert len(changed | {KEY}) == len(OTHERS) + 1
    assert len({str(key) for key in changed | {KEY}}) == len(OTHERS) + 1


def test_the_form_of_a_table_changes_the_key_and_its_shared_memory() -> None:
    full = dataclasses.replace(TABLED, table="full")
    assert full != TABLED
    assert str(full) != str(TABLED)
    assert eval(repr(full)) == full
    assert (full.dynamic_shared_bytes, TABLED.dynamic_shared_bytes) == (65536, 0)


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
        ({"table": "large"}, KernelValueError, "table 'large' is not one of compact, full"),
        ({"table": "full"}, KernelValueError, "mul1 at K = 3 has no full table; lut_e4m3 has one at K = 2"),
    ],
)
def test_illegal_keys_are_refused(change: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        dataclasses.replace(KEY, **change)


@pytest.mark.parametrize("arch", ARCHS)
def test_registry_has_every_codebook_rate_and_dtype_once(arch: str) -> None:
    keys = decode_keys(arch)
    wanted = {
        (arch, codebook.name, rate.half_bits, dtype, "compact")
        for codebook in CODEBOOKS.values()
        for rate in codebook.legal_rates
        for dtype in VALUE_BYTES
    }
    wanted |= {(arch, "lut_e4m3", 4, dtype, "full") for dtype in VALUE_BYTES}
    assert len(keys) == len(wanted) == (27 + 5 + 1) * 3
    assert {dataclasses.astuple(key) for key in keys} == wanted
    assert set(keys) <= set(registered_keys(arch))


def test_unknown_target_has_no_registry() -> None:
    with pytest.raises(KernelValueError, match="sm_70"):
        registered_keys("sm_70")
