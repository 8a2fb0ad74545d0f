"""Holds the few-token key to its rules: every field is in the binary, illegal ones are refused with the numbers."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from trellis_format.activations import Activation
from trellis_format.errors import FormatValueError
from trellis_kernels.cute.moe_key import (
    MOST_BYTE_CHANNELS,
    MoeSmallKey,
    Tiling,
    counters_per_token,
    expert_class,
    scratch_nbytes,
    scratch_parts,
)  # fmt: skip
from trellis_kernels.errors import KernelTypeError, KernelUnsupportedError, KernelValueError

KEY = MoeSmallKey(
    arch="sm_90a",
    codebook="mul1",
    hidden=1000,
    padded_hidden=1024,
    width=384,
    max_experts=256,
    top_k=4,
    gated=True,
    up_rates=(5, 6),
    down_rates=(8,),
    activation=Activation("silu"),
)
EXPERTS = 12
CHANGES = {
    "arch": "sm_100a",
    "codebook": "mul1",  # see below: the other codebooks have no half rates
    "hidden": 1001,
    "padded_hidden": 1152,
    "width": 512,
    "max_experts": 1024,
    "top_k": 5,
    "gated": True,  # joined with the activation
    "up_rates": (6,),
    "down_rates": (8, 10),
    "activation": Activation("situ"),
    "biased": (True, True, False),
    "shared_inputs": True,
    "joint_inputs": True,
    "shared_outputs": True,
    "x_dtype": "bfloat16",
    "out_dtype": "float32",
    "weight_dtype": "float16",
    "id_bytes": 4,
    "arithmetic": "bytes",
    "row_columns": 2,
    "direct": True,
    "up": Tiling(split=2),
    "down": Tiling(blocks=2),
}


def test_every_field_changes_the_key() -> None:
    assert set(CHANGES) == {field.name for field in fields(MoeSmallKey)}
    keys = {replace(KEY, **{name: value}) for name, value in CHANGES.items()}
    assert len(keys - {KEY}) == len(CHANGES) - 2
    whole = replace(KEY, up_rates=(6,))
    assert replace(whole, codebook="mcg") != whole
    gateless = replace(KEY, gated=False, activation=Activation("relu2"))
    assert gateless != KEY


def test_repr_evaluates_back() -> None:
    names = {"MoeSmallKey": MoeSmallKey, "Tiling": Tiling, "Activation": Activation}
    for name, value in CHANGES.items():
        key = replace(KEY, **{name: value})
        assert eval(repr(key), names) == key


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"arch": "sm_70"}, KernelValueError, "sm_70"),
        ({"codebook": "mcg"}, FormatValueError, "2.5"),
        ({"width": 200}, KernelValueError, "width 200 is not a positive multiple of 128; nearest: 256"),
        ({"padded_hidden": 0}, KernelValueError, "nearest: 128"),
        ({"hidden": 1025}, KernelValueError, "hidden 1025 must be within 1..1024"),
        ({"top_k": 0}, KernelValueError, "top 0"),
        ({"up_rates": (6, 5)}, KernelValueError, "ascending"),
        ({"down_rates": ()}, KernelValueError, "not empty"),
        ({"activation": Activation("relu2")}, KernelValueError, "takes no gate"),
        ({"gated": False}, KernelValueError, "takes a gate"),
        ({"x_dtype": "float64"}, KernelTypeError, "float64"),
        ({"id_bytes": 2}, KernelTypeError, "got 2"),
        ({"row_columns": 3}, KernelValueError, "1, 2, 4"),
        ({"arithmetic": "fast"}, KernelValueError, "exact, unrounded, bytes"),
        ({"up": Tiling(blocks=2)}, KernelValueError, "3 blocks of 128 channels, not a multiple of 2"),
        ({"down": Tiling(slices=32)}, KernelValueError, "2048 threads, at most 1024"),
    ],
)
def test_illegal_keys_are_refused(change, error, message: str) -> None:
    with pytest.raises(error, match=message):
        replace(KEY, **change)


def test_bytes_are_for_mul1_and_sums_that_fit() -> None:
    whole = replace(KEY, up_rates=(6,))
    with pytest.raises(KernelUnsupportedError, match="needs codebook mul1, got 3inst; use exact"):
        replace(whole, codebook="3inst", arithmetic="bytes")
    wide = replace(KEY, padded_hidden=MOST_BYTE_CHANNELS, arithmetic="bytes")
    assert 1020 * 128 * wide.padded_hidden < 2**31
    with pytest.raises(KernelUnsupportedError, match=f"at most {MOST_BYTE_CHANNELS} input channels, got 16512"):
        replace(KEY, padded_hidden=MOST_BYTE_CHANNELS + 128, arithmetic="bytes")


def test_unrounded_products_are_for_codebooks_without_tables() -> None:
    whole = replace(KEY, up_rates=(6,))
    for codebook in ("mul1", "mcg", "3inst"):
        assert replace(whole, codebook=codebook, arithmetic="unrounded").group_rows == 8
    with pytest.raises(KernelUnsupportedError, match="codebooks 3inst, mcg, mul1, got lut_e4m3; use exact"):
        replace(whole, codebook="lut_e4m3", arithmetic="unrounded")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"row_columns": 2}, KernelValueError, "row_columns 1 and a down split of 1, got 2 and 1"),
        ({"down": Tiling(split=2)}, KernelValueError, "row_columns 1 and a down split of 1, got 1 and 2"),
        ({"padded_hidden": 384, "hidden": 384, "up": Tiling(split=4)}, KernelValueError, "at most 3 ways, got 4"),
    ],
)
def test_direct_layers_split_whole_blocks_of_gate_and_up_alone(change, error, message: str) -> None:
    with pytest.raises(error, match=message):
        replace(KEY, direct=True, **change)


def test_direct_layers_keep_sums_of_gate_and_up_and_results() -> None:
    key = replace(KEY, direct=True, up=Tiling(split=8), top_k=9)
    parts = {"arrivals": 4 * 8, "up_parts": 9 * 8 * 2 * 384 * 4, "results": 9 * 1024 * 4}
    assert scratch_parts(key) == parts
    assert list(scratch_parts(KEY))[-1] == list(parts)[-1] == "results"


def test_a_direct_layer_has_a_group_for_every_route() -> None:
    assert replace(KEY, direct=True).most_groups(5, 1) == 20


def test_experts_have_the_smallest_class() -> None:
    assert [expert_class(count) for count in (1, 256, 257, 1024)] == [256, 256, 1024, 1024]
    for count in (0, 1025):
        with pytest.raises(KernelUnsupportedError, match=f"{count} experts: few-token kernels take 1 to 1024"):
            expert_class(count)
    with pytest.raises(KernelValueError, match="max_experts 12 is not one of 256, 1024"):
        replace(KEY, max_experts=12)


def test_a_token_has_at_most_a_word_of_routes() -> None:
    assert replace(KEY, top_k=32).top_k == 32
    with pytest.raises(KernelUnsupportedError, match="top 33 is more than 32 routes"):
        replace(KEY, top_k=33)


def test_rows_are_read_again_from_rings_alone() -> None:
    assert Tiling(in_shared=True, rereads=True) != Tiling(in_shared=True)
    assert str(Tiling(in_shared=True, rereads=True)) != str(Tiling(in_shared=True))
    with pytest.raises(KernelValueError, match="set in_shared"):
        Tiling(rereads=True)


def test_a_tiling_may_bound_how_many_share_a_multiprocessor() -> None:
    assert len({str(Tiling(most=most)) for most in (0, 1, 2)}) == 3
    with pytest.raises(KernelValueError, match="most must not be negative, got -1"):
        Tiling(most=-1)


def test_tilings_are_positive() -> None:
    with pytest.raises(KernelValueError, match="split must be at least 1, got 0"):
        Tiling(split=0)


def test_threads_and_groups() -> None:
    assert KEY.threads("up") == 32 * 4 * 2
    assert KEY.threads("down") == 32 * 2 * 2
    assert replace(KEY, gated=False, activation=Activation("relu2")).threads("up") == 32 * 2 * 2
    assert replace(KEY, down=Tiling(blocks=4, slices=1)).threads("down") == 256
    assert [replace(KEY, row_columns=count).group_rows for count in (1, 2, 4)] == [8, 16, 32]
    assert replace(KEY, row_columns=2, arithmetic="bytes").group_rows == 8
    # every route its own expert; then no more groups than experts and full groups
    assert [KEY.most_groups(tokens, 12) for tokens in (1, 3, 4, 100)] == [4, 12, 12 + 2, 12 + 50]


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_most_groups_is_reached_and_never_passed(tokens: int) -> None:
    routes = tokens * KEY.top_k
    worst = 0
    for full in range(routes // KEY.group_rows + 1):
        # the other experts have one route each; one expert has the rest
        spread = min(EXPERTS - 1, routes - full * KEY.group_rows)
        rest = routes - spread
        worst = max(worst, spread + -(-rest // KEY.group_rows))
    assert worst <= KEY.most_groups(tokens, EXPERTS) <= KEY.most_groups(tokens)


def test_scratch_has_room_for_each_part() -> None:
    parts = scratch_parts(KEY)
    assert parts["slots"] == 4 * 16
    assert parts["rotated"] == 4 * 2 * 1024 * 2
    assert parts["joined"] == 4 * 384 * 2
    assert parts["results"] == 4 * 1024 * 4
    assert parts["up_parts"] == parts["joined_bytes"] == parts["rotated_laws"] == 0
    assert parts["counters"] >= 4 * counters_per_token(KEY) == 4 * (4 * (3 + 8 + 2) + 8)
    split = scratch_parts(replace(KEY, up=Tiling(split=3), down=Tiling(split=2)))
    assert split["up_parts"] == 4 * 3 * 2 * 384 * 4
    assert split["down_parts"] == 4 * 2 * 1024 * 4
    shared = scratch_parts(replace(KEY, shared_inputs=True, joint_inputs=True, arithmetic="bytes"))
    assert shared["rotated"] == 1024 * 2
    assert shared["rotated_laws"] == 16
    assert all(size % 16 == 0 for size in (*parts.values(), *split.values(), *shared.values()))


def test_scratch_grows_with_capacity() -> None:
    one = scratch_nbytes(KEY, 1)
    assert scratch_nbytes(KEY, 9) - one == 8 * sum(scratch_parts(KEY).values())
    with pytest.raises(KernelValueError, match="at least 1, got 0"):
        scratch_nbytes(KEY, 0)
