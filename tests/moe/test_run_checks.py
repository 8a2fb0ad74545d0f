"""Holds the rules of a run to refusing what a launch could not take, each for its own reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moe.samples import Layer, make_layer, make_plan
from trellis_kernels.layers import DeviceLimits
from trellis_moe import MoeError, MoeTypeError, MoeValueError
from trellis_moe.run_checks import RunRules

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)
NAMES = ("x", "topk_ids", "topk_weights", "out")


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("2",))


@pytest.fixture
def arena() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8)


def tensors(tokens: int = 4, **changes: Any) -> list[Any]:
    plain = {
        "x": torch.zeros(tokens, 256, dtype=torch.float16),
        "topk_ids": torch.zeros(tokens, 3, dtype=torch.int64),
        "topk_weights": torch.zeros(tokens, 3),
        "out": torch.zeros(tokens, 256),
    }
    return [(plain | changes)[name] for name in NAMES]


def test_what_is_right_is_counted(layer: Layer, arena: torch.Tensor) -> None:
    rules = RunRules(make_plan(layer), arena)
    for tokens in (0, 1, 9):
        assert rules.check(*tensors(tokens)) == tokens
    with pytest.raises(MoeValueError, match="10 tokens exceed the plan's 9"):
        rules.check(*tensors(10))


def test_only_the_torch_backend_takes_other_dtypes_of_routes(layer: Layer, arena: torch.Tensor) -> None:
    torch_rules = RunRules(make_plan(layer), arena)
    fused_rules = RunRules(make_plan(layer, device="cuda", limits=HOPPER), arena)
    for changes in (
        {"topk_ids": torch.zeros(4, 3, dtype=torch.int32)},
        {"topk_weights": torch.zeros(4, 3, dtype=torch.bfloat16)},
    ):
        assert torch_rules.check(*tensors(**changes)) == 4
        with pytest.raises(MoeTypeError, match=f"{next(iter(changes))} must be torch.(int64|float32), got"):
            fused_rules.check(*tensors(**changes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda _tensor: 7, MoeTypeError, "must be a Tensor, got int"),
        (lambda tensor: tensor.to(torch.float64), MoeTypeError, "got torch.float64"),
        (lambda tensor: tensor.to("meta"), MoeTypeError, "must be on cpu, got meta"),
        (lambda tensor: tensor[:, 1:], MoeValueError, r"must be \[4, \d+\], got \[4, \d+\]"),
        (lambda tensor: tensor[0], MoeValueError, r"must have two axes, \[tokens, \d+\], got \[\d+\]"),
        (lambda tensor: torch.cat((tensor, tensor), 1)[:, ::2], MoeValueError, "must be contiguous, got strides"),
    ],
    ids=["kind", "dtype", "device", "shape", "axes", "strides"],
)
def test_each_tensor_is_refused_by_its_name(
    layer: Layer, arena: torch.Tensor, name: str, change: Any, kind: type[MoeError], words: str
) -> None:
    given = tensors()
    index = NAMES.index(name)
    given[index] = change(given[index])
    with pytest.raises(kind, match=f"{name} {words}" if words.startswith("must") else f"{name} must be .*{words}"):
        RunRules(make_plan(layer), arena).check(*given)


@pytest.mark.parametrize("name", ["x", "out"])
def test_fused_kernels_take_rows_from_a_boundary_on(layer: Layer, arena: torch.Tensor, name: str) -> None:
    plain = tensors()[NAMES.index(name)]
    memory = torch.zeros(plain.numel() + 8, dtype=plain.dtype)
    moved = memory[1:][: plain.numel()].view(plain.shape)
    assert RunRules(make_plan(layer), arena).check(*tensors(**{name: moved})) == 4
    fused = RunRules(make_plan(layer, device="cuda", limits=HOPPER), arena)
    past = moved.data_ptr() % 16
    with pytest.raises(MoeValueError, match=f"{name} must begin on a boundary of 16 bytes, got {past} past one"):
        fused.check(*tensors(**{name: moved}))


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_may_lie_in_the_scratch(layer: Layer, arena: torch.Tensor, name: str) -> None:
    plain = tensors()[NAMES.index(name)]
    inside = arena[-plain.nbytes :].view(plain.dtype).view(plain.shape)
    with pytest.raises(MoeValueError, match=rf"{name} at bytes \d+\.\.\d+ overlaps scratch at \d+\.\.\d+"):
        RunRules(make_plan(layer), arena).check(*tensors(**{name: inside}))
    assert RunRules(make_plan(layer), arena[: -plain.nbytes]).check(*tensors(**{name: inside})) == 4


def test_the_output_may_lie_in_no_input(layer: Layer, arena: torch.Tensor) -> None:
    rules = RunRules(make_plan(layer, output_dtype="float16"), arena)
    memory = torch.zeros(4096, dtype=torch.float16)
    for first, second in itertools.product((0, 1023, 1024), repeat=2):
        x, out = memory[first : first + 1024].view(4, 256), memory[second : second + 1024].view(4, 256)
        if abs(first - second) >= 1024:
            assert rules.check(*tensors(x=x, out=out)) == 4
        else:
            with pytest.raises(MoeValueError, match=r"out at bytes .* overlaps x at"):
                rules.check(*tensors(x=x, out=out))
