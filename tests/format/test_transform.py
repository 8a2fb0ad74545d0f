"""Holds the intermediate Hadamard to its blocks, its halves and the order of its windows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slot_files import random_linears
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.source import Projection
from trellis_format.transform import ExpertTransform, interleave


def slots(first: int, count: int, axis: int = 3072) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=axis, first_slot=first, slot_count=count)


def test_repr_evaluates_back() -> None:
    assert eval(repr(ExpertTransform())) == ExpertTransform(pre_block=512, post_block=128)


@pytest.mark.parametrize(("name", "value"), [("pre_block", True), ("post_block", 128.0), ("pre_block", "512")])
def test_blocks_are_ints(name: str, value: object) -> None:
    with pytest.raises(FormatTypeError, match=f"{name} must be an int, got {type(value).__name__}"):
        ExpertTransform(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -128, 96, 129])
def test_blocks_are_powers_of_two(value: int) -> None:
    with pytest.raises(FormatValueError, match=f"post_block {value} is not a power of two"):
        ExpertTransform(post_block=value)


@pytest.mark.parametrize(("pre", "post"), [(256, 128), (512, 64), (512, 256)])
def test_other_blocks_are_refused_by_name(pre: int, post: int) -> None:
    with pytest.raises(FormatUnsupportedError, match=f"blocks {pre} and {post} is not handled; supported: 512 and 128"):
        ExpertTransform(pre_block=pre, post_block=post)


def test_a_share_must_cut_no_block() -> None:
    ExpertTransform().check(1024, slots(4, 8))
    with pytest.raises(FormatValueError, match="hidden channels in blocks of 512, got 768"):
        ExpertTransform().check(768, slots(0, 4))
    with pytest.raises(FormatValueError, match=r"blocks of 128 channels, got 64\.\.192"):
        ExpertTransform().check(512, slots(2, 4))


@pytest.mark.parametrize(
    ("first", "count", "half"), [(0, 48, 0), (0, 4, 0), (44, 4, 0), (48, 48, 1), (48, 4, 1), (92, 4, 1)]
)
def test_a_share_lies_in_one_half(first: int, count: int, half: int) -> None:
    assert ExpertTransform.half(slots(first, count)) == half


@pytest.mark.parametrize(("first", "count"), [(0, 96), (44, 8), (0, 52), (40, 56)])
def test_a_share_of_both_halves_is_refused_with_the_boundary(first: int, count: int) -> None:
    end = first + count
    text = rf"slots {first}\.\.{end} crosses the half boundary at slot 48.*{first}\.\.48 and 48\.\.{end}"
    with pytest.raises(FormatValueError, match=text):
        ExpertTransform.half(slots(first, count))


@pytest.mark.parametrize("width", [64, 128, 384])
def test_windows_take_slots_of_the_two_in_turn(width: int) -> None:
    first, second = np.arange(2 * width).reshape(2, width), -1 - np.arange(2 * width).reshape(2, width)
    expected: list[list[int]] = [[], []]
    for row in range(2):
        for a in range(0, width, 64):
            for begin in (a, a + 32):
                expected[row] += first[row, begin : begin + 32].tolist() + second[row, begin : begin + 32].tolist()
    assert interleave(first, second).tolist() == expected


def test_a_source_may_have_one() -> None:
    source, weights = random_linears(hidden=512, codebook="mcg", rates=(2,), transform=True)
    assert eval(repr(source), vars(__import__("trellis_format.source", fromlist=["x"])) | globals()) == source
    assert weights.expert_sign_patterns is not None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"biased": (Projection.DOWN,)}, "down has a bias"),
        ({"joint_input_scales": False}, "gate and up have an input vector each"),
    ],
)
def test_a_source_with_one_needs_plain_experts(changes: dict[str, object], text: str) -> None:
    source, _ = random_linears(hidden=512, codebook="mcg", rates=(2,), transform=True)
    with pytest.raises(FormatValueError, match=f"intermediate Hadamard: {text}"):
        dataclasses.replace(source, **changes)  # type: ignore[arg-type]


def test_a_source_with_one_needs_gates_whole_blocks_and_no_padding() -> None:
    plain, _ = random_linears(hidden=512, codebook="mcg", rates=(2,), gated=False)
    with pytest.raises(FormatValueError, match="experts have no gate"):
        dataclasses.replace(plain, expert_transform=ExpertTransform())
    padded, _ = random_linears(hidden=512, codebook="mcg", rates=(2,), joint=True, true_sizes=(500, 300))
    with pytest.raises(FormatValueError, match="96 channels are padding"):
        dataclasses.replace(padded, expert_transform=ExpertTransform())
    narrow, _ = random_linears(hidden=384, codebook="mcg", rates=(2,), joint=True)
    with pytest.raises(FormatValueError, match="blocks of 512, got 384"):
        dataclasses.replace(narrow, expert_transform=ExpertTransform())
    with pytest.raises(FormatTypeError, match="source expert_transform has the wrong type dict"):
        dataclasses.replace(narrow, expert_transform={})  # type: ignore[arg-type]
