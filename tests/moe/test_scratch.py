"""Holds scratch to its bytes and to buffers that do not touch."""

from __future__ import annotations

import pytest
import torch

from moe.samples import LAWS, make_layer, make_plan
from trellis_moe import MoeError, MoeTypeError, MoeValueError, ScratchBuffer
from trellis_moe.scratch import ALIGNMENT, carve, op_by_op_scratch, place, total_bytes

BUFFERS = (
    ScratchBuffer("ids", "int32", (3,)),
    ScratchBuffer("rows", "float16", (3, 5)),
    ScratchBuffer("none", "float32", (0, 7)),
    ScratchBuffer("sums", "float32", (2, 2)),
    ScratchBuffer("last", "int64", (1,)),
)


def test_bytes_are_counted_on_boundaries() -> None:
    assert [buffer.nbytes for buffer in BUFFERS] == [12, 30, 0, 16, 8]
    assert total_bytes(BUFFERS) == 16 + 32 + 0 + 16 + 16
    assert total_bytes(()) == 0


def test_buffers_are_apart_aligned_and_hold_what_is_written() -> None:
    arena = torch.full((total_bytes(BUFFERS),), 0xFF, dtype=torch.uint8)
    views = carve(arena, BUFFERS)
    assert list(views) == [buffer.name for buffer in BUFFERS]
    for number, buffer in enumerate(BUFFERS):
        view = views[buffer.name]
        assert (view.dtype, tuple(view.shape)) == (getattr(torch, buffer.dtype), buffer.shape)
        assert view.is_contiguous()
        assert view.data_ptr() % ALIGNMENT == 0 or not view.numel()
        view.fill_(number + 1)
    for number, buffer in enumerate(BUFFERS):
        assert (views[buffer.name] == number + 1).all()
    padding = arena[12:16].tolist() + arena[46:48].tolist() + arena[-8:].tolist()
    assert padding == [0xFF] * 14


def test_a_larger_arena_is_left_alone_past_the_plan() -> None:
    arena = torch.zeros(total_bytes(BUFFERS) + 64, dtype=torch.uint8)
    for view in carve(arena, BUFFERS).values():
        view.fill_(-1)
    assert not arena[total_bytes(BUFFERS) :].any()


@pytest.mark.parametrize(
    ("arena", "kind", "parts"),
    [
        (torch.zeros(80, dtype=torch.int8), MoeTypeError, ("torch.uint8", "torch.int8")),
        ([0] * 80, MoeTypeError, ("torch.uint8", "list")),
        (torch.zeros(79, dtype=torch.uint8), MoeValueError, ("79 bytes", "80")),
        (torch.zeros(0, dtype=torch.uint8), MoeValueError, ("0 bytes", "80")),
        (torch.zeros(2, 40, dtype=torch.uint8), MoeValueError, ("one contiguous axis", "[2, 40]")),
        (torch.zeros(160, dtype=torch.uint8)[::2], MoeValueError, ("one contiguous axis", "strides (2,)")),
        (torch.zeros(96, dtype=torch.uint8)[3:], MoeValueError, ("3 bytes past", f"boundary of {ALIGNMENT}")),
    ],
    ids=["dtype", "list", "a byte short", "empty", "two axes", "strided", "misaligned"],
)
def test_arenas_that_do_not_serve_are_refused(
    arena: torch.Tensor, kind: type[MoeError], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        carve(arena, BUFFERS)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("law", [LAWS[0], LAWS[5]], ids=["gate", "no gate"])
def test_a_plan_states_the_sum_of_what_its_path_needs(law: object) -> None:
    layer = make_layer(activation=law, hidden=200, intermediate=320, experts=2, rates=("1",))
    plan = make_plan(layer, tokens=7, top_k=3)
    routes, hidden, width = 21, 256, 384
    branches = 2 if law.gated else 1
    expected = routes * (8 + 8 + 4 + 4 + 2 * hidden + branches * 4 * width + 2 * width + 4 * hidden)
    (variant,) = plan.variants
    assert sum(buffer.nbytes for buffer in variant.scratch) == expected
    assert plan.required_nbytes() == expected + sum(-buffer.nbytes % ALIGNMENT for buffer in variant.scratch)
    assert variant.scratch == op_by_op_scratch(plan.weights, 7, 3)


def test_places_follow_each_other_on_boundaries() -> None:
    specs = place(8, BUFFERS)
    assert [spec.buffer for spec in specs] == list(BUFFERS)
    assert [spec.first for spec in specs] == [0, 16, 48, 48, 64]
    assert {spec.launch_tokens for spec in specs} == {8}
