"""Holds the many-row GEMM of every target to the law: its operand in numpy, its binaries, and a GPU's results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.cute.moe_samples import error, expected, make_experts, make_routes, routes_of_counts
from kernels.cute.prefill_law import image_of
from kernels.cute.test_prefill_layer import plan_of, run
from trellis_format.activations import Activation
from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import ALL_RATES, Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.prefill_key import LEAST_SHARED_LIMIT, PrefillMmaKey
from trellis_kernels.cute.prefill_share import PANEL_CHANNELS, PANEL_ROW_BYTES, channel_order, column_share

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import prefill_mma
from trellis_kernels.cute.report import report_kernel

LANE = np.arange(32)


def test_an_operand_is_the_rows_in_the_order_of_the_fragments() -> None:
    """Lane 4g + t takes inputs 2t and 2t + 1 of row g, eight further for the second half, without bank conflicts."""
    rows = np.arange(8 * PANEL_CHANNELS, dtype=np.float16).reshape(8, PANEL_CHANNELS)
    memory = image_of(rows).reshape(-1).view(np.uint8)
    order = channel_order()
    for index, half in np.ndindex(4, 2):
        address = (LANE >> 2) * PANEL_ROW_BYTES + prefill_mma.fragment_offset(LANE, index, half)
        assert np.unique(address // 4 % 32).size == 32
        found = memory[address[:, None] + np.arange(4)].copy().view(np.float16)
        places = 16 * index + 8 * half + 2 * (LANE & 3)[:, None] + np.arange(2)
        np.testing.assert_array_equal(found, rows[LANE >> 2][LANE[:, None], order[places]])


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
@pytest.mark.parametrize("rows", [8, 40, 128])
def test_every_byte_of_a_step_is_copied_once(rate: Rate, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two threads write one place, so nothing depends on their order; rows past the block's are left alone."""
    codebook = next(book.name for book in CODEBOOKS.values() if rate in book.legal_rates)
    key, share = PrefillMmaKey("sm_80", codebook, (rate.half_bits,)), column_share(rate)
    copies: list[tuple[np.ndarray, ...]] = []

    def copy(target, source, live) -> None:
        copies.append(np.broadcast_arrays(target, source, live is None or live))

    monkeypatch.setattr(prefill_mma.wgmma, "copy_where", copy)
    monkeypatch.setattr(prefill_mma.gpu, "commit_copies", lambda: None)
    for name, convert in (("Int64", np.int64), ("Boolean", np.asarray)):
        monkeypatch.setattr(prefill_mma, name, convert)
    s_codes, g_codes, pitch = key.row_stage_bytes, 1 << 20, 5 * share.row_bytes
    prefill_mma._copy_step(0, g_codes, pitch, 0, s_codes, rows * PANEL_ROW_BYTES, np.arange(256), share, key)
    targets, sources, lives = (np.concatenate(part) for part in zip(*copies, strict=True))
    found = dict(zip(targets[lives].tolist(), sources[lives].tolist(), strict=True))
    assert len(found) == np.count_nonzero(lives)
    wanted = {place: place for place in range(0, rows * PANEL_ROW_BYTES, 16)}
    for row in range(4):
        for inside in range(0, share.row_bytes, 16):
            wanted[s_codes + row * share.row_pitch + inside] = g_codes + row * pitch + inside
    assert found == wanted


@pytest.mark.parametrize("rate", ALL_RATES, ids=str)
def test_every_rate_fits_the_least_shared_memory_twice_buffered(rate: Rate) -> None:
    codebook = next(book.name for book in CODEBOOKS.values() if rate in book.legal_rates)
    key = PrefillMmaKey(
        "sm_80", codebook, (rate.half_bits, rate.half_bits), "join", Activation("silu"), biased=(True, True)
    )
    assert key.stages == 2
    assert key.dynamic_shared_bytes <= LEAST_SHARED_LIMIT


@pytest.mark.parametrize("arch", ARCHS)
def test_the_binary_has_no_stack_and_fits(arch: str) -> None:
    join = PrefillMmaKey(arch, "mul1", (6, 8), "join", Activation("silu"), biased=(True, False))
    for key in (join, PrefillMmaKey(arch, "mcg", (6,), "down", out_dtype="float16")):
        report = report_kernel(key)
        assert report.error is None, report.error
        assert report.stack_bytes == 0, key


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"rates": ["3"], "hidden": 384, "intermediate": 384},
        {"rates": ["1.5", "3"], "intermediate": 256},
        {"codebook": "mcg", "rates": ["4"], "biased": True, "up_divisor": 4.0},
        {"codebook": "3inst", "rates": ["8", "2"], "joint": True},
        {"activation": Activation("relu2")},
        {"codebook": "lut_e4m3", "rates": ["2", "4"]},
    ],
    ids=str,
)
def test_a_layer_is_near_float64_with_any_engine(options) -> None:
    experts = make_experts(experts=8, **options)
    for routes in (make_routes(experts, 90), routes_of_counts(experts, [0, 1, 31, 33, 128, 129, 300, 64])):
        plan = plan_of(experts, routes, engine="mma")
        found = run(experts, routes, plan, factor=experts.source.up_divisor)
        assert error(found, expected(experts, routes)) <= 1e-3


@pytest.mark.gpu
def test_bits_of_the_engine_depend_on_no_cut_and_repeat() -> None:
    experts = make_experts()
    routes = make_routes(experts, 200)
    plan = plan_of(experts, routes, engine="mma")
    whole = run(experts, routes, plan)
    for changes in ({}, {"chunk_tokens": 63}, {"window_slots": 104}):
        assert torch.equal(run(experts, routes, replace(plan, **changes)), whole)
