"""Holds the reduction kernels to the torch backend's bits, and the atomic sum to the float64 one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kernel_cases import as_bits, poisoned
from trellis_kernels import KernelTypeError, KernelValueError
from trellis_kernels.cpu.reduce import reduce_routes as truth

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.reduce import reduce_routes

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 1, 128, 128), (5, 3, 256, 250), (33, 8, 1408, 1408), (4, 16, 2944, 2880), (7, 2, 103, 101)]


def case(tokens: int, top_k: int, padded: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + 7 * top_k)
    rows = torch.randn(tokens * top_k, padded, generator=generator)
    return rows, torch.rand(tokens, top_k, generator=generator).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("weight_dtype", "out_dtype"), [*itertools.product(FLOATS, FLOATS)])
@pytest.mark.parametrize(("tokens", "top_k", "padded", "channels"), SHAPES)
def test_gpu_ordered_sum(weight_dtype, out_dtype, tokens: int, top_k: int, padded: int, channels: int) -> None:
    rows, weights = case(tokens, top_k, padded, weight_dtype)
    wanted = truth(rows, weights, factor=3.0, out=poisoned(tokens, channels, dtype=out_dtype))
    out = poisoned(tokens, channels, dtype=out_dtype, device="cuda")
    assert reduce_routes(rows.cuda(), weights.cuda(), factor=3.0, out=out) is out
    np.testing.assert_array_equal(as_bits(out), as_bits(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS[:2])
@pytest.mark.parametrize(("tokens", "top_k", "padded", "channels"), SHAPES[:4])
def test_gpu_atomic_sum(weight_dtype, out_dtype, tokens: int, top_k: int, padded: int, channels: int) -> None:
    rows, weights = case(tokens, top_k, padded, weight_dtype)
    accumulator = poisoned(tokens + 3, padded, device="cuda")
    out = poisoned(tokens, channels, dtype=out_dtype, device="cuda")
    reduce_routes(rows.cuda(), weights.cuda(), factor=3.0, accumulator=accumulator, out=out)
    scale = (weights.float() * 3.0)[:, :, None]
    terms = (rows.view(tokens, top_k, padded)[:, :, :channels] * scale).to(out_dtype).double()
    wanted, size = terms.sum(1), terms.abs().sum(1)
    step = 2.0**-11 if out_dtype == torch.float16 else 2.0**-8
    assert bool(((out.cpu().double() - wanted).abs() <= step * wanted.abs() + top_k * 2.0**-23 * size).all())
    assert torch.isnan(accumulator[tokens:]).all()  # rows that are not live stay untouched


@pytest.mark.gpu
@pytest.mark.parametrize("atomic", [False, True])
def test_gpu_zeros_stay_exact_and_nan_comes_through(atomic: bool) -> None:
    rows = torch.zeros(6, 64, device="cuda")
    weights = torch.rand(3, 2, device="cuda")
    accumulator = poisoned(3, 64, device="cuda") if atomic else None
    out = poisoned(3, 64, dtype=torch.bfloat16, device="cuda")
    reduce_routes(rows, weights, accumulator=accumulator, out=out)
    assert not as_bits(out).any()
    rows[3, 7], rows[4, 9] = float("nan"), float("inf")
    reduce_routes(rows, weights, accumulator=accumulator, out=out)
    assert (~torch.isfinite(out)).nonzero().tolist() == [[1, 7], [2, 9]]


@pytest.mark.gpu
def test_gpu_matrices_may_be_slices_of_wider_ones() -> None:
    rows, weights = case(9, 4, 256, torch.float32)
    wide_weights = torch.rand(9, 6)
    wide_weights[:, 1:5] = weights
    wanted = truth(rows[:, :128], weights, out=poisoned(9, 128))
    out = poisoned(9, 200, device="cuda")
    reduce_routes(rows.cuda()[:, :128], wide_weights.cuda()[:, 1:5], out=out[:, 72:])
    np.testing.assert_array_equal(as_bits(out[:, 72:]), as_bits(wanted))
    assert torch.isnan(out[:, :72]).all()


@pytest.mark.gpu
def test_gpu_ordered_sum_repeats_bit_for_bit() -> None:
    rows, weights = (tensor.cuda() for tensor in case(64, 8, 1024, torch.float32))
    first = reduce_routes(rows, weights, out=poisoned(64, 1024, device="cuda"))
    for _ in range(100):
        again = reduce_routes(rows, weights, out=poisoned(64, 1024, device="cuda"))
        np.testing.assert_array_equal(as_bits(again), as_bits(first))


@pytest.mark.gpu
def test_gpu_no_work() -> None:
    out = poisoned(0, 64, device="cuda")
    assert reduce_routes(torch.zeros(0, 64, device="cuda"), torch.zeros(0, 4, device="cuda"), out=out) is out
    out = poisoned(3, 64, device="cuda")
    reduce_routes(torch.zeros(0, 64, device="cuda"), torch.zeros(3, 0, device="cuda"), out=out)
    assert not out.any()


@pytest.mark.gpu
def test_gpu_wrong_accumulators_are_refused() -> None:
    rows, weights = torch.zeros(6, 64, device="cuda"), torch.zeros(3, 2, device="cuda")
    out = torch.zeros(3, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelValueError, match="at least 3 rows, got 2"):
        reduce_routes(rows, weights, accumulator=torch.zeros(2, 64, device="cuda"), out=out)
    with pytest.raises(KernelTypeError, match="atomic sum must be torch"):
        reduce_routes(rows, weights, accumulator=torch.zeros(3, 64, device="cuda"), out=out.float())


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(KernelTypeError, match="rows must be on a CUDA device, got cpu"):
        reduce_routes(torch.zeros(1, 8), torch.zeros(1, 1), out=torch.zeros(1, 8))
