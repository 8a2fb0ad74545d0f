"""Holds the torch grouped GEMM to the float64 product of exact codes, and each row's bits to its own input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import PAIRS, as_bits, poisoned, random_bank, relative_error
from trellis_format.rates import ALL_RATES, Rate
from trellis_kernels import KernelTypeError, KernelValueError, pack_routes
from trellis_kernels.cpu.gemm import grouped_gemm

K, N = 256, 128


def inputs(routes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(routes, K, generator=torch.Generator().manual_seed(seed)).half()


def product(a: torch.Tensor, weights: np.ndarray, experts: list[int]) -> np.ndarray:
    """`[routes, n] float64`; a route without an expert is zeros."""
    rows = [
        row @ weights[expert] if 0 <= expert < len(weights) else np.zeros(weights.shape[2])
        for row, expert in zip(a.double().numpy(), experts, strict=True)
    ]
    return np.stack(rows)


@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_product_of_exact_codes(codebook: str, rate: Rate) -> None:
    bank, weights = random_bank(codebook, [rate] * 3, K, N)
    experts = [0, 2, 2, -1, 0, 2, 3]
    a, out = inputs(7), poisoned(7, N)
    routes = pack_routes(torch.tensor(experts).view(-1, 1), num_experts=3, block_rows=8)
    assert grouped_gemm(a, bank, routes, out=out) is out
    truth = product(a, weights, experts)
    np.testing.assert_array_equal(out.numpy(), truth.astype(np.float32))
    assert not out[[3, 6]].any()


def test_every_rate_in_one_bank() -> None:
    bank, weights = random_bank("mul1", list(ALL_RATES), K, N)
    experts = [*range(len(ALL_RATES)), 5, 0]
    a, out = inputs(len(experts)), poisoned(len(experts), N)
    ids = torch.tensor(experts, dtype=torch.int32).view(-1, 1)
    grouped_gemm(a, bank, pack_routes(ids, num_experts=bank.num_experts, block_rows=16), out=out)
    assert relative_error(out, product(a, weights, experts)) < 1e-7


@pytest.mark.parametrize("block_rows", [8, 64])
def test_a_rows_bits_do_not_depend_on_its_place_or_its_neighbours(block_rows: int) -> None:
    bank, _ = random_bank("3inst", [Rate.of(3), Rate.of(2)], K, N)
    one = inputs(1, seed=9)
    one[0, ::7] *= 3e3  # a wide range, where sums in another order would differ
    one[0, 1::7] *= 1e-4

    def run(count: int, place: int) -> np.ndarray:
        a = inputs(count)
        a[place] = one[0]
        ids = torch.tensor([[(index + place) % 2] for index in range(count)])
        ids[place] = 1
        out = poisoned(count, N)
        grouped_gemm(a, bank, pack_routes(ids, num_experts=2, block_rows=block_rows), out=out)
        return as_bits(out[place])

    alone = run(1, 0)
    for count, place in [(2, 1), (3, 0), (5, 4), (17, 9), (64, 63), (130, 77)]:
        np.testing.assert_array_equal(run(count, place), alone)


def test_what_is_not_finite_stays_in_its_row() -> None:
    bank, _ = random_bank("mcg", [Rate.of(4)], K, N)
    a, out = inputs(3), poisoned(3, N)
    a[1, 5] = float("inf")
    ids = torch.zeros(3, 1, dtype=torch.int32)
    grouped_gemm(a, bank, pack_routes(ids, num_experts=1, block_rows=8), out=out)
    assert torch.isinf(out[1]).all()  # no weight of this codebook's tile row is zero
    assert torch.isfinite(out[[0, 2]]).all()


def test_no_routes_are_no_work() -> None:
    bank, _ = random_bank("mcg", [Rate.of(4)], K, N)
    routes = pack_routes(torch.zeros(0, 2, dtype=torch.int32), num_experts=1, block_rows=8)
    out = poisoned(0, N)
    assert grouped_gemm(inputs(0), bank, routes, out=out) is out


@pytest.mark.parametrize(
    ("a", "out", "error", "text"),
    [
        (torch.zeros(2, K), poisoned(2, N), KernelTypeError, "a must be torch.float16"),
        (torch.zeros(2, N).half(), poisoned(2, N), KernelValueError, r"a must be \[\*, 256\], got \[2, 128\]"),
        (torch.zeros(2, K).half(), poisoned(2, K), KernelValueError, r"out must be \[2, 128\], got \[2, 256\]"),
        (torch.zeros(2, K).half(), poisoned(2, N).half(), KernelTypeError, "out must be torch.float32"),
        (torch.zeros(2, K).half(), poisoned(2, N, device="meta"), KernelTypeError, "out must be on cpu"),
    ],
)
def test_wrong_arguments_are_refused(a: torch.Tensor, out: torch.Tensor, error: type[Exception], text: str) -> None:
    bank, _ = random_bank("mcg", [Rate.of(1)], K, N)
    routes = pack_routes(torch.zeros(2, 1, dtype=torch.int32), num_experts=1, block_rows=8)
    with pytest.raises(error, match=text):
        grouped_gemm(a, bank, routes, out=out)


def test_routes_of_another_layer_are_refused() -> None:
    bank, _ = random_bank("mcg", [Rate.of(1)], K, N)
    routes = pack_routes(torch.zeros(2, 1, dtype=torch.int32), num_experts=3, block_rows=8)
    with pytest.raises(KernelValueError, match=r"expert_counts must be \[1\], got \[3\]"):
        grouped_gemm(inputs(2), bank, routes, out=poisoned(2, N))
