"""Holds the few-row kernels of a linear to their key: what it refuses, what it changes, how it cuts the channels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from trellis_format.errors import FormatValueError
from trellis_kernels import KernelUnsupportedError, KernelValueError
from trellis_kernels.cute.linear_key import SHARE_BLOCKS, LinearKey, choose_share

KEY = LinearKey("sm_90a", "mul1", 6, 4096, "bfloat16", "bfloat16", False, 4)
OTHERS: dict[str, Any] = {
    "arch": "sm_80", "codebook": "mcg", "half_bits": 8, "n": 128, "x_dtype": "float16", "out_dtype": "float32",
    "biased": True, "share_blocks": 8, "slices": 2, "stages": 3,
}  # fmt: skip


def test_every_field_changes_the_key_and_its_repr_evaluates_back() -> None:
    assert set(OTHERS) == {field.name for field in fields(KEY)}
    for name, value in OTHERS.items():
        other = replace(KEY, **{name: value})
        assert other != KEY
        assert eval(repr(other)) == other
    assert str(KEY) == "linear_few sm_90a mul1 K=3 n=4096 bfloat16->bfloat16 share 4"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"half_bits": 99}, FormatValueError, "is not legal"),
        ({"codebook": "lut_e4m3"}, KernelUnsupportedError, "is decoded with a table; few rows take 3inst, mcg, mul1"),
        ({"n": 192}, KernelValueError, "n 192 is not a positive multiple of 128"),
        ({"x_dtype": "float64"}, KernelValueError, "x_dtype 'float64' is not one of float16"),
        ({"share_blocks": 3}, KernelValueError, r"share_blocks 3 is not one of \(2, 4, 8, 16, 32\)"),
        ({"slices": 9}, KernelValueError, "a share has 8 steps"),
        ({"stages": 0}, KernelValueError, "0 stages"),
    ],
)
def test_what_is_not_legal_is_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        replace(KEY, **changes)


@pytest.mark.parametrize("multiprocessors", [78, 132])
@pytest.mark.parametrize(("k", "n"), [(128, 128), (2048, 4096), (4096, 12288), (2048, 151936), (1408, 4096)])
def test_a_share_is_the_largest_that_fills_the_device(k: int, n: int, multiprocessors: int) -> None:
    share = choose_share(k, n, multiprocessors)

    def blocks(size: int) -> int:
        return n // 128 * replace(KEY, n=n, share_blocks=size, slices=1).split(k)

    larger = [size for size in SHARE_BLOCKS if size > share]
    assert all(blocks(size) < 2 * multiprocessors for size in larger)
    assert blocks(share) >= 2 * multiprocessors or share == SHARE_BLOCKS[0]


def test_shares_cover_the_input_channels_once() -> None:
    for share in SHARE_BLOCKS:
        key = replace(KEY, share_blocks=share, slices=1)
        for k in (128, 1408, 4096, 12288):
            spans = [(rank * share, min((rank + 1) * share, k // 128)) for rank in range(key.split(k))]
            assert [block for first, end in spans for block in range(first, end)] == list(range(k // 128))
