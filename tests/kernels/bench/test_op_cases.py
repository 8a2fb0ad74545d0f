"""Holds the cases of ops to outputs that a check accepts, and to checks that refuse wrong outputs."""

from __future__ import annotations

import pytest
import torch

from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_kernels.bench.op_cases import GROUPS, OpCase, OpSizes, cases, keys
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.cute.op_keys import PackKey, ReduceKey, RotateKey

CPU = torch.device("cpu")
SIZES = OpSizes(
    decode=(48, 80), rates=("2", "3"), hidden=512, rows=(3,), packs=((70, 3, 7, 8), (5, 2, 40, 16)), tokens=(5, 20)
)


def made(group: str) -> list[OpCase]:
    return list(cases(group, SIZES, CPU))


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_is_right_after_its_launches(group: str) -> None:
    for case in made(group):
        if group != "pack":  # packing has no output before its launch
            assert not case.error() <= case.bound, case
        for launch in case.launches:
            launch()
        assert case.error() <= case.bound, case
        assert case.moved_bytes > 0


def test_the_error_of_a_decode_is_the_share_of_wrong_weights() -> None:
    for case in made("decode"):
        for launch in case.launches:
            out = launch()
        assert case.error() == 0.0
        out[0, 7] += 1.0
        assert case.error() == pytest.approx(1 / (48 * 80))


def test_the_error_of_a_packing_counts_routes_out_of_place() -> None:
    case = made("pack")[0]
    packed = [launch() for launch in case.launches]
    first, second = packed[0].route_indices[:2].clone()
    packed[0].route_indices[0], packed[0].route_indices[1] = second, first
    assert case.error() == pytest.approx(2 / (4 * 210))


def test_an_unordered_packing_may_have_any_order_inside_a_segment() -> None:
    stable, unordered = made("pack")[:2]
    packed = [launch() for launch in unordered.launches]
    assert int(packed[0].expert_counts[0]) >= 2
    packed[0].route_indices[:2] = packed[0].route_indices[:2].flip(0).clone()
    assert unordered.error() == 0.0
    packed[0].route_indices[0] = packed[0].route_indices[int(packed[0].expert_offsets[1])]
    assert unordered.error() > 0.0
    assert "unordered" in unordered.case
    assert "unordered" not in stable.case


def test_keys_are_those_that_cases_launch() -> None:
    decoded = keys("decode", SIZES, "sm_90a")
    assert {key.codebook for key in decoded if isinstance(key, DecodeKey)} == {
        name for name, book in CODEBOOKS.items() if {Rate.of("2"), Rate.of("3")} & set(book.legal_rates)
    }
    assert {type(key) for key in keys("rotate", SIZES, "sm_90a")} == {RotateKey}
    assert {type(key) for key in keys("reduce", SIZES, "sm_90a")} == {ReduceKey}
    pack = keys("pack", SIZES, "sm_90a")
    assert {key.stage for key in pack if isinstance(key, PackKey)} == {"all", "count", "offsets", "place"}


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_gpu_precompiled_keys_are_all_that_a_group_launches(group: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute import compiler
    from trellis_kernels.cute.archs import arch_of_device

    compiler.precompile(keys(group, SIZES, arch_of_device(0).name), jobs=None)
    compiler.freeze()
    try:
        for case in cases(group, SIZES, torch.device("cuda")):
            if "full table" in case.case:
                continue
            for launch in case.launches:
                launch()
            assert case.error() <= case.bound, case
    finally:
        compiler.thaw()
