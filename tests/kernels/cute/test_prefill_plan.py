"""Holds the plan of many tokens to its bound: what fits, what is cut, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trellis_format.activations import Activation
from trellis_kernels.bench.layers import random_source
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.prefill_key import block_capacity
from trellis_kernels.cute.prefill_plan import SCRATCH_ALIGNMENT, PrefillPlan, plan_prefill
from trellis_kernels.cute.prefill_share import ROW_GROUP
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError
from trellis_kernels.routes import route_capacity

MIB = 1 << 20


def source(**options):
    settings = {"experts": 8, "hidden": 512, "intermediate": 256, "codebook": "mul1", "rates": ["3"]}
    return random_source(**(settings | options))


def plan(max_tokens: int = 300, top_k: int = 3, bound: int | None = None, **options) -> PrefillPlan:
    return plan_prefill(source(**options), arch="sm_90a", max_tokens=max_tokens, top_k=top_k, scratch_bound=bound)


def test_without_a_bound_there_is_one_chunk_and_one_window() -> None:
    whole = plan()
    assert whole.chunk_tokens == 300
    assert whole.windows(900) == ((0, whole.window_slots),)
    assert whole.window_slots >= route_capacity(900, 8, ROW_GROUP)


def test_repr_evaluates_back() -> None:
    assert eval(repr(plan())) == plan()


@pytest.mark.parametrize("tokens", [1, 7, 300, 4096, 16384])
@pytest.mark.parametrize("megabytes", [24, 64, 320])
def test_scratch_stays_within_the_bound(tokens: int, megabytes: int) -> None:
    bounded = plan(tokens, bound=megabytes * MIB)
    assert bounded.scratch_nbytes <= megabytes * MIB
    assert 1 <= bounded.chunk_tokens <= tokens
    assert bounded.window_slots % ROW_GROUP == 0


@pytest.mark.parametrize("routes", [1, 5, 900, 12000])
def test_windows_cover_every_slot_once(routes: int) -> None:
    bounded = plan(4096, bound=24 * MIB)
    ends = 0
    for first, slots in bounded.windows(routes):
        assert first == ends
        assert 0 < slots <= bounded.window_slots
        assert first % ROW_GROUP == slots % ROW_GROUP == 0
        ends = first + slots
    assert ends >= route_capacity(routes, 8, ROW_GROUP)


def test_scratch_is_the_sum_of_its_aligned_parts() -> None:
    bounded = plan(4096, bound=64 * MIB)
    parts = bounded.scratch_parts
    rounded = sum(-(-nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for nbytes in parts.values())
    assert bounded.scratch_nbytes == rounded
    assert parts["rows"] == bounded.chunk_tokens * 3 * 512 * 2
    assert parts["image_0"] == parts["image_1"] == bounded.window_slots * 512 * 2
    assert parts["joined"] == bounded.window_slots * 256 * 2


def test_a_large_layer_at_nine_ranks_stays_under_320_mib() -> None:
    """896 experts of 3,584 by 384 channels, 16 routes a token, 4,096 tokens."""
    large = source(experts=896, hidden=3584, intermediate=384, shared=True, joint=True)
    bounded = plan_prefill(large, arch="sm_90a", max_tokens=4096, top_k=16, scratch_bound=320 * MIB)
    assert bounded.scratch_nbytes <= 320 * MIB
    assert bounded.chunk_tokens >= 1024


def test_scratch_does_not_grow_with_experts_beyond_their_padding() -> None:
    few, many = (plan(4096, bound=None, experts=count) for count in (8, 16))
    grown = {name: many.scratch_parts[name] - nbytes for name, nbytes in few.scratch_parts.items()}
    assert grown["rows"] == 0
    assert grown["image_0"] <= 8 * ROW_GROUP * 512 * 2


def test_a_bound_below_one_token_is_refused_with_what_it_needs() -> None:
    with pytest.raises(KernelValueError, match="bound of 1000 bytes is below the"):
        plan(bound=1000)


def test_keys_have_every_combination_of_rates() -> None:
    mixed = plan(rates=["3", "4", "2.5"])
    joins = {key.half_bits for key in mixed.keys if getattr(key, "epilogue", "") == "join"}
    downs = {key.half_bits for key in mixed.keys if getattr(key, "epilogue", "") == "down"}
    assert joins == set(mixed.up_rates)
    assert downs == {(rate,) for rate in mixed.down_rates}
    assert {key.kernel for key in mixed.keys} == {
        "pack_routes", "prefill_schedule", "prefill_image", "prefill_short", "prefill_middle", "prefill_gemm",
        "prefill_reduce",
    }  # fmt: skip


def test_one_cut_of_rows_serves_every_linear_where_experts_have_the_same_rates() -> None:
    assert plan().is_uniform
    assert plan(rates=["3", "3", "4"]).is_uniform
    assert not plan(rates=["3", "4"]).is_uniform


def test_gate_and_up_share_an_image_where_they_share_their_vector() -> None:
    assert (plan().images, plan(joint=True).images) == (2, 1)
    assert plan(activation=Activation("relu2")).images == 1


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"max_tokens": 0}, KernelValueError, "0 tokens"),
        ({"top_k": 0}, KernelValueError, "0 routes"),
        ({"max_tokens": 2**30, "top_k": 2}, KernelValueError, str(2**31 - 1)),
        ({"hidden": 250}, KernelValueError, "248"),
        ({"experts": 5000, "hidden": 128, "intermediate": 128}, KernelUnsupportedError, "4096"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, says) -> None:
    with pytest.raises(error, match=says):
        plan(**change)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_target_has_an_engine_whose_blocks_the_entries_suffice_for(arch: str) -> None:
    made = plan_prefill(source(), arch=arch, max_tokens=300, top_k=3)
    assert made.engine == (None if arch == "sm_90a" else "mma")
    schedules = [key.block_rows for key in made.keys if key.kernel == "prefill_schedule"]
    assert min(schedules) == made.block_rows
    assert made.scratch_parts["entries"] == 32 * block_capacity(made.window_slots, 8, made.block_rows)


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(KernelValueError, match="sm_1"):
        plan_prefill(source(), arch="sm_1", max_tokens=10, top_k=2)


def test_codebooks_with_tables_have_kernels() -> None:
    assert {key.codebook for key in plan(codebook="lut_e4m3", rates=["2"]).keys if hasattr(key, "codebook")} == {
        "lut_e4m3"
    }


def test_chunks_of_few_routes_take_short_row_blocks() -> None:
    """8 experts of their own and 8 elsewhere: 16 * 52 and 16 * 72 routes."""
    made = plan_prefill(source(), arch="sm_90a", max_tokens=600, top_k=2, route_experts=16)
    assert made.engines == ("wgmma_short", "wgmma_middle", "wgmma_tall")
    assert [made.engine_for(routes) for routes in (1, 832, 833, 1152, 1153)] == [
        "wgmma_short", "wgmma_short", "wgmma_middle", "wgmma_middle", "wgmma_tall"
    ]  # fmt: skip
    assert made.block_rows == 64
    kernels = {key.kernel for key in made.keys if hasattr(key, "epilogue")}
    assert kernels == {"prefill_short", "prefill_middle", "prefill_gemm"}
    assert {key.block_rows for key in made.keys if key.kernel == "prefill_schedule"} == {64, 96, 256}
    wide = plan_prefill(source(intermediate=1408), arch="sm_90a", max_tokens=600, top_k=2, route_experts=16)
    assert wide.engines == ("wgmma_short", "wgmma_tall")
    few = plan_prefill(source(), arch="sm_90a", max_tokens=208, top_k=2)
    assert few.engines == ("wgmma_short",)
    assert replace(few, engine="wgmma_tall").engines == ("wgmma_tall",)


def test_a_layer_without_an_activation_needs_one() -> None:
    with pytest.raises(KernelUnsupportedError, match="activation"):
        plan_prefill(replace(source(), activation=None), arch="sm_90a", max_tokens=10, top_k=2)


def test_an_atomic_reduction_has_a_row_for_each_token_rather_than_for_each_route() -> None:
    ordered, atomic = (
        plan_prefill(source(), arch="sm_90a", max_tokens=300, top_k=6, reduction=reduction)
        for reduction in ("ordered", "atomic")
    )
    assert "rows" not in atomic.scratch_parts
    assert atomic.scratch_parts["sums"] == 300 * 512 * 4
    assert atomic.scratch_nbytes < ordered.scratch_nbytes
    assert {key.epilogue for key in atomic.keys if hasattr(key, "epilogue")} == {"join", "add"}
    assert {key.stage for key in atomic.keys if key.kernel == "reduce_routes"} == {"zero", "copy"}
    assert eval(repr(atomic)) == atomic != ordered


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"max_tokens": 8}, KernelUnsupportedError, "8 tokens are not above 8"),
        ({"out_dtype": "float32"}, KernelUnsupportedError, "results are float32"),
        ({"max_tokens": 1, "out_dtype": "float32"}, KernelUnsupportedError, "1 tokens .*; results are float32"),
        ({"reduction": "sideways"}, KernelValueError, "'sideways' is not one of ordered, atomic"),
    ],
)
def test_an_atomic_reduction_names_every_condition_that_fails(change, error, says) -> None:
    settings = {"max_tokens": 300, "top_k": 3, "reduction": "atomic"} | change
    with pytest.raises(error, match=says):
        plan_prefill(source(), arch="sm_90a", **settings)


def test_a_large_layer_takes_more_tokens_at_once_by_atomic_additions() -> None:
    large = source(experts=896, hidden=3584, intermediate=384, shared=True, joint=True)
    chunks = {
        reduction: plan_prefill(
            large, arch="sm_90a", max_tokens=4096, top_k=16, scratch_bound=320 * MIB, reduction=reduction
        ).chunk_tokens
        for reduction in ("ordered", "atomic")
    }
    assert chunks["ordered"] < chunks["atomic"]
