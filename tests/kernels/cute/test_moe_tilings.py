"""Holds the choice of tilings to legality, and to what it is made of: measurements near by, else the rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trellis_format.activations import Activation
from trellis_kernels.cute.moe_key import PRODUCT_ROWS, MoeSmallKey, expert_class
from trellis_kernels.cute.moe_tilings import _MEASURED, Shape, choose


def key_of(shape: Shape, tokens: int, multiprocessors: int = 132) -> MoeSmallKey:
    choice = choose(shape, max_tokens=tokens, multiprocessors=multiprocessors)
    return MoeSmallKey(
        arch=shape.arch,
        codebook=shape.codebook,
        hidden=shape.padded_hidden,
        padded_hidden=shape.padded_hidden,
        width=shape.width,
        max_experts=expert_class(shape.num_experts),
        top_k=shape.top_k,
        gated=True,
        up_rates=(6,),
        down_rates=(6,),
        activation=Activation("silu"),
        arithmetic=shape.arithmetic,
        row_columns=choice.row_columns,
        direct=choice.direct,
        up=choice.up,
        down=choice.down,
    )


@pytest.mark.parametrize("shape", _MEASURED, ids=lambda shape: f"{shape.arithmetic}-{shape.codebook}-{shape.width}")
def test_measured_choices_are_taken_near_their_token_counts(shape: Shape) -> None:
    for tokens, choice in _MEASURED[shape].items():
        assert choose(shape, max_tokens=tokens, multiprocessors=132) == choice
        key_of(shape, tokens)  # legal
    most = max(_MEASURED[shape])
    far = choose(shape, max_tokens=8 * most, multiprocessors=132)
    assert far == choose(replace(shape, arch="sm_100a"), max_tokens=8 * most, multiprocessors=132)


@pytest.mark.parametrize("arithmetic", PRODUCT_ROWS)
@pytest.mark.parametrize("multiprocessors", [1, 84, 132, 188])
def test_rule_is_legal_for_every_shape(arithmetic: str, multiprocessors: int) -> None:
    sizes = (128, 256, 384, 1408, 7168)
    for hidden, width, experts, tokens in itertools.product(sizes, sizes, (1, 8, 896), (1, 3, 16, 128)):
        shape = Shape("sm_100a", arithmetic, "mul1", hidden, width, experts, min(8, experts))
        key = key_of(shape, tokens, multiprocessors)
        assert key.up.split * key.up.slices <= max(hidden // 64, 2)
        assert key.down.split == 1


def test_few_units_are_split_and_many_are_not() -> None:
    shape = Shape("sm_120a", "exact", "mul1", 4096, 1408, 128, 8)
    splits = [choose(shape, max_tokens=tokens, multiprocessors=132).up.split for tokens in (1, 4, 64)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] == 3  # 88 units on 132 SMs with two thread blocks each
    assert splits[-1] == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_thread_blocks_fit_the_shared_memory_at_the_highest_rate(arch: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute.moe_direct_down import direct_down_bytes
    from trellis_kernels.cute.moe_direct_up import direct_up_bytes
    from trellis_kernels.cute.moe_down import down_shared_bytes
    from trellis_kernels.cute.moe_up import up_shared_bytes

    limit = {"sm_80": 163, "sm_120a": 99}.get(arch, 227) * 1024
    for width, tokens, arithmetic in itertools.product((256, 1408), (1, 8, 32, 128), PRODUCT_ROWS):
        key = key_of(Shape(arch, arithmetic, "mul1", 4096, width, 128, 8), tokens)
        key = replace(key, up_rates=(16,), down_rates=(16,))
        assert (direct_up_bytes if key.direct else up_shared_bytes)(key) <= limit
        assert (direct_down_bytes if key.direct else down_shared_bytes)(key) <= limit


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_thread_blocks_fit_a_multiprocessor_than_a_tiling_allows(most: int) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute.moe_direct_down import direct_down_bytes
    from trellis_kernels.cute.moe_direct_up import direct_up_bytes

    key = key_of(Shape("sm_90a", "exact", "mul1", 2048, 768, 128, 8), 1)
    bound = replace(key, up=replace(key.up, most=most), down=replace(key.down, most=most))
    for count in (direct_up_bytes, direct_down_bytes):
        each = count(bound) + 1024  # that every thread block reserves
        assert most * each <= 228 * 1024 < (most + 1) * each
        assert count(key) <= count(bound) <= 227 * 1024
