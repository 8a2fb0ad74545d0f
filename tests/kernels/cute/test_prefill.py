"""Holds the many-row grouped GEMM to float64 on a GPU: every codebook and rate, ragged segments, repeated bits."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import packed_by_loop, poisoned, random_bank, relative_error
from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_kernels import CodeBank, PackedRoutes
from trellis_kernels.cpu.routes import pack_routes
from trellis_kernels.errors import KernelTypeError, KernelValueError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import prefill
from trellis_kernels.cute.prefill_key import BLOCK_ROWS_MOST

PAIRS = [pytest.param(name, rate, id=f"{name}-{rate}") for name in CODEBOOKS for rate in CODEBOOKS[name].legal_rates]

gpu = pytest.mark.gpu


def on_gpu(bank: CodeBank) -> CodeBank:
    return CodeBank(bank.codebook, bank.k, bank.n, bank.words.cuda(), bank.descriptors.cuda(), bank.places)


def ids_of_counts(counts: list[int]) -> torch.Tensor:
    """`[routes, 1] int64`, expert e taking `counts[e]` routes in shuffled order, and two that are none."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = torch.cat([ids, torch.tensor([-1, len(counts)])])
    return ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(3))][:, None]


def multiply(bank: CodeBank, a: torch.Tensor, ids: torch.Tensor, block_rows: int = 8) -> torch.Tensor:
    routes: PackedRoutes = pack_routes(ids.cuda(), num_experts=bank.num_experts, block_rows=block_rows)
    out = poisoned(ids.numel(), bank.n, device="cuda")
    return prefill.grouped_gemm(a.cuda(), on_gpu(bank), routes, out=out)


def check(bank: CodeBank, weights, counts: list[int], block_rows: int = 8) -> None:
    ids = ids_of_counts(counts)
    a = torch.randn(ids.numel(), bank.k, generator=torch.Generator().manual_seed(5)).half()
    found = multiply(bank, a, ids, block_rows)
    truth = torch.zeros(ids.numel(), bank.n, dtype=torch.float64)
    for expert in range(len(counts)):
        mine = ids[:, 0] == expert
        truth[mine] = a[mine].double() @ torch.from_numpy(weights[expert])
    assert relative_error(found, truth.numpy()) < 2e-6
    assert torch.equal(multiply(bank, a, ids, block_rows), found)


@gpu
@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_every_codebook_and_rate(codebook: str, rate: Rate) -> None:
    bank, weights = random_bank(codebook, [rate] * 3, 256, 384)
    check(bank, weights, [5, 0, 70])


@gpu
@pytest.mark.parametrize("block_rows", [8, 32, 128])
def test_ragged_segments(block_rows: int) -> None:
    bank, weights = random_bank("mul1", [Rate(6)] * 8, 384, 128)
    check(bank, weights, [0, 1, 33, 64, 95, 129, 256, 300], block_rows)


@gpu
def test_rates_mixed_over_experts() -> None:
    bank, weights = random_bank("mul1", [Rate(6), Rate(8), Rate(6), Rate(5)], 256, 256)
    check(bank, weights, [40, 41, 0, 3])


@gpu
def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    bank, _ = random_bank("mul1", [Rate(6)] * 2, 512, 256)
    a = torch.randn(200, 512, generator=torch.Generator().manual_seed(2)).half()
    ids = torch.arange(200)[:, None] % 2
    whole = multiply(bank, a, ids)
    # the whole takes tall row blocks, the parts short ones
    for part in (slice(0, 1), slice(10, 53), slice(150, 200)):
        assert torch.equal(multiply(bank, a[part], ids[part]), whole[part])


@gpu
def test_blocks_follow_the_segments_and_the_rates() -> None:
    rates = [Rate(6), Rate(8), Rate(6), Rate(6), Rate(6)]
    counts = [300, 50, 0, 33, 128]
    bank = on_gpu(random_bank("mul1", rates, 128, 128)[0])
    ids = ids_of_counts(counts)
    routes = pack_routes(ids.cuda(), num_experts=5, block_rows=8)
    law = packed_by_loop(ids.numpy(), 5, 8)
    entries = torch.full((prefill.block_capacity(len(law["slots"]), 5), 8), -7, dtype=torch.int32, device="cuda")
    count = torch.full((1,), -7, dtype=torch.int32, device="cuda")
    for window in (prefill.whole_window(routes), prefill.Window(64, 328)):
        prefill.make_blocks(routes, (bank,), (6,), window, entries, count, engine="wgmma_tall")
        covered = []
        for expert, slot, rows, image_row, *codes in entries[: int(count)].tolist():
            assert rates[expert] == Rate(6)
            assert 1 <= rows <= BLOCK_ROWS_MOST
            assert image_row == slot - window.first
            assert codes == [bank.places[expert][0] // 4] * 3 + [0]
            covered += [(expert, place) for place in range(slot, slot + rows)]
        expected = [
            (expert, slot)
            for expert in range(5)
            if rates[expert] == Rate(6)
            for slot in range(law["offsets"][expert], law["offsets"][expert] + counts[expert])
            if window.first <= slot < window.first + window.slots
        ]
        assert covered == expected


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_are_summed_in_order_and_dead_ones_skipped(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(-2, 12, (50, 6), generator=generator)
    weights = torch.randn(50, 6, generator=generator).to(dtype)
    rows = torch.randn(300, 384, generator=generator).half()
    live = (ids >= 0) & (ids < 10)
    rows[~live.reshape(-1)] = float("nan")
    out = poisoned(50, 384, dtype=dtype, device="cuda")
    prefill.sum_rows(rows.cuda(), ids.cuda(), weights.cuda(), num_experts=10, expert_map=None, factor=1.5, out=out)
    kept = torch.where(live[..., None], rows.reshape(50, 6, 384).double(), 0.0)
    truth = (kept * weights.double()[..., None] * 1.5).sum(1)
    bound = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype]
    assert relative_error(out, truth.numpy()) < bound


def test_what_is_refused_on_the_host() -> None:
    bank, _ = random_bank("mul1", [Rate(6)], 128, 128)
    routes = pack_routes(torch.zeros(3, 1, dtype=torch.int64), num_experts=1, block_rows=8)
    with pytest.raises(KernelTypeError, match="CUDA"):
        prefill.grouped_gemm(torch.zeros(3, 128, dtype=torch.float16), bank, routes, out=torch.zeros(3, 128))


def test_too_few_blocks_are_refused() -> None:
    bank, _ = random_bank("mul1", [Rate(6)], 128, 128)
    routes = pack_routes(torch.zeros(3, 1, dtype=torch.int64), num_experts=1, block_rows=8)
    entries, count = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelValueError, match="need 2 row blocks, got 1"):
        prefill.make_blocks(routes, (bank,), (6,), prefill.Window(0, 8), entries, count, engine="wgmma_tall")


def test_rate_pairs_are_those_of_the_experts() -> None:
    gate, _ = random_bank("mul1", [Rate(6), Rate(8), Rate(6)], 128, 128)
    up, _ = random_bank("mul1", [Rate(6), Rate(4), Rate(6)], 128, 128)
    assert prefill.rate_pairs((gate, up)) == ((6, 6), (8, 4))
    assert prefill.rate_pairs((up,)) == ((4,), (6,))
