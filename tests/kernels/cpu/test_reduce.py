"""Holds the torch reduction to the float64 sum, and to its order, which decides its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import as_bits, poisoned
from trellis_kernels import KernelTypeError, KernelValueError
from trellis_kernels.cpu.reduce import reduce_routes

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def case(tokens: int, top_k: int, padded: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + 7 * top_k)
    rows = torch.randn(tokens * top_k, padded, generator=generator)
    return rows, torch.rand(tokens, top_k, generator=generator).to(dtype)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "top_k", "channels"), [(1, 1, 128), (5, 3, 100), (7, 8, 1)])
def test_weighted_sum(
    out_dtype: torch.dtype, weight_dtype: torch.dtype, tokens: int, top_k: int, channels: int
) -> None:
    rows, weights = case(tokens, top_k, 128, weight_dtype)
    out = poisoned(tokens, channels, dtype=out_dtype)
    assert reduce_routes(rows, weights, factor=128.0, out=out) is out
    terms = rows.view(tokens, top_k, 128).double() * weights.double()[:, :, None] * 128.0
    truth = terms.sum(1)[:, :channels]
    bound = STEP[out_dtype] * truth.abs() + top_k * 2.0**-23 * terms.abs().sum(1)[:, :channels]
    assert bool(((out.double() - truth).abs() <= bound).all())


def test_slots_are_added_in_order_in_float32() -> None:
    rows, weights = case(6, 5, 64)
    out = poisoned(6, 64)
    reduce_routes(rows, weights, factor=3.0, out=out)
    total = np.zeros((6, 64), np.float32)
    for slot in range(5):
        scaled = (weights[:, slot].numpy() * np.float32(3.0))[:, None]
        total += rows.view(6, 5, 64)[:, slot].numpy() * scaled
    np.testing.assert_array_equal(out.numpy(), total)


@pytest.mark.parametrize("out_dtype", FLOATS[:2])
def test_an_accumulator_rounds_each_term_and_keeps_what_is_beyond(out_dtype: torch.dtype) -> None:
    rows, weights = case(4, 3, 64)
    accumulator, out = poisoned(6, 64), poisoned(4, 60, dtype=out_dtype)
    assert reduce_routes(rows, weights, factor=0.5, accumulator=accumulator, out=out) is out
    terms = (rows.view(4, 3, 64) * (weights * 0.5)[:, :, None]).to(out_dtype).float()
    total = torch.zeros(4, 64)
    for slot in range(3):
        total += terms[:, slot]
    np.testing.assert_array_equal(as_bits(out), as_bits(total[:, :60].to(out_dtype)))
    assert torch.isnan(accumulator[4:]).all()


def test_a_token_does_not_see_its_neighbours() -> None:
    rows, weights = case(9, 4, 96)
    whole, alone = poisoned(9, 96), poisoned(1, 96)
    reduce_routes(rows, weights, out=whole)
    reduce_routes(rows[20:24], weights[5:6], out=alone)
    np.testing.assert_array_equal(as_bits(whole[5]), as_bits(alone))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_through_where_it_is(bad: float) -> None:
    rows, weights = case(3, 2, 64)
    rows[3, 7] = bad
    out = poisoned(3, 64)
    reduce_routes(rows, weights, out=out)
    assert (~torch.isfinite(out)).nonzero().tolist() == [[1, 7]]


def test_rows_of_zeros_give_exact_zeros() -> None:
    out = poisoned(3, 60, dtype=torch.bfloat16)
    reduce_routes(torch.zeros(6, 64), torch.rand(3, 2), out=out)
    assert not as_bits(out).any()


def test_no_tokens_are_no_work() -> None:
    out = poisoned(0, 64)
    assert reduce_routes(torch.zeros(0, 64), torch.zeros(0, 4), out=out) is out


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rows": torch.zeros(6, 64).half()}, KernelTypeError, "rows must be torch.float32"),
        ({"rows": torch.zeros(5, 64)}, KernelValueError, r"rows must be \[6, \*\], got \[5, 64\]"),
        ({"topk_weights": torch.zeros(3, 2).double()}, KernelTypeError, "topk_weights must be"),
        ({"topk_weights": torch.zeros(6)}, KernelValueError, r"topk_weights must be \[\*, \*\], got \[6\]"),
        ({"out": torch.zeros(3, 64).double()}, KernelTypeError, "out must be"),
        ({"out": torch.zeros(2, 64)}, KernelValueError, r"out must be \[3, \*\], got \[2, 64\]"),
        ({"out": torch.zeros(3, 65)}, KernelValueError, "out has 65 channels, the rows 64"),
        ({"accumulator": torch.zeros(3, 64)}, KernelTypeError, "out of an atomic sum must be torch.float16 or"),
        (
            {"accumulator": torch.zeros(2, 64), "out": poisoned(3, 64).half()},
            KernelValueError,
            "at least 3 rows, got 2",
        ),
        ({"accumulator": torch.zeros(3, 60), "out": poisoned(3, 64).half()}, KernelValueError, r"got \[3, 60\]"),
        ({"accumulator": torch.zeros(3, 64).half(), "out": poisoned(3, 64).half()}, KernelTypeError, "torch.float32"),
        ({"out": torch.zeros(3, 64, device="meta")}, KernelTypeError, "out must be on cpu"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], error: type[Exception], text: str) -> None:
    call = {"rows": torch.zeros(6, 64), "topk_weights": torch.zeros(3, 2), "out": poisoned(3, 64)} | change
    with pytest.raises(error, match=text):
        reduce_routes(call.pop("rows"), call.pop("topk_weights"), **call)
