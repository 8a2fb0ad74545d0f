"""Holds preparation, binding and runs to naming memory that runs out at any allocation, and to going on afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.samples import Layer, bits, distance, make_layer, make_plan, make_routes, truth
from slot_files import random_linears
from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import DeviceLimits
from trellis_moe import Binding, ExecutionPlan, MoeMemoryError, Session, bind, prepare_weights
from trellis_prep import PreparedExperts, PrepMemoryError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS: dict[str, Callable[[], Layer]] = {
    "plain": lambda: make_layer(hidden=128, intermediate=128, rates=("2", "3"), biased=True),
    "table": lambda: Layer(
        *random_linears(hidden=128, intermediate=128, codebook="lut_e4m3", rates=(3,), transform=False)
    ),
    "Hadamard": lambda: Layer(
        *random_linears(hidden=512, intermediate=128, codebook="mcg", rates=(2, 3), transform=True)
    ),
}
TOKENS = 5
_INJECTED = "memory is gone"


class Allocations(TorchDispatchMode):
    """Counts operations that give new storage on a device, and fails in place of one of them.

    Args:
        device: type of the device.
        fails: number of the one that fails, from 0; None is none.
    """

    def __init__(self, device: str, fails: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self._device, self._fails = device, fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {self._place(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and self._place(leaf) not in known
        ]
        if any(tensor.device.type == self._device and tensor.untyped_storage().nbytes() for tensor in made):
            self.count += 1
            if self.count - 1 == self._fails:
                raise torch.OutOfMemoryError(_INJECTED)
        return result

    @staticmethod
    def _place(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


def each_failure(device: str, step: Callable[[], object], kind: type[BaseException], most: int = 1 << 20) -> int:
    """Run a step with a failure at each of its allocations in turn, or at so many of them; gives their number."""
    with Allocations(device) as honest:
        step()
    for number in range(0, honest.count, -(-honest.count // most)):
        with pytest.raises(kind, match=_INJECTED), Allocations(device, number):
            step()
    return honest.count


def held(device: str) -> int:
    """Bytes that torch holds on a GPU, once it has done what it was given and has seen so."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def prepared(name: str, device: str) -> tuple[Layer, ExecutionPlan, PreparedExperts]:
    layer = LAYERS[name]()
    plan = make_plan(layer, tokens=TOKENS, device=device)
    return layer, plan, prepare_weights(plan.weights, layer.weights, device=device)


def check(layer: Layer, binding: Binding) -> bytes:
    """The bits of a run, near the truth."""
    routes = make_routes(layer, TOKENS, 3)
    device = binding.experts.device
    out = torch.full(routes.x.shape, float("nan"), device=device)
    binding.run(routes.x.to(device), routes.ids.to(device), routes.weights.to(device), out=out)
    assert distance(out.cpu(), truth(layer, routes)) <= 1e-3
    return bits(out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_memory_that_runs_out_while_a_layer_is_prepared(name: str, device: str) -> None:
    layer = LAYERS[name]()
    plan = make_plan(layer, tokens=TOKENS, device=device)
    before = held(device)
    count = each_failure(
        device, lambda: prepare_weights(plan.weights, layer.weights, device=device) and None, PrepMemoryError
    )
    assert count >= 5  # codes, descriptors, and three tables of scales
    assert held(device) == before
    check(layer, bind(plan, prepare_weights(plan.weights, layer.weights, device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_memory_that_runs_out_while_a_plan_is_bound(name: str, device: str) -> None:
    layer, plan, experts = prepared(name, device)
    expected = check(layer, bind(plan, experts))
    before = held(device)
    assert each_failure(device, lambda: bind(plan, experts) and None, MoeMemoryError) >= 1
    assert held(device) == before
    assert check(layer, bind(plan, experts)) == expected


@pytest.mark.parametrize("name", LAYERS)
def test_memory_that_runs_out_in_a_run_on_the_torch_backend(name: str) -> None:
    layer, plan, experts = prepared(name, "cpu")
    binding, routes = bind(plan, experts), make_routes(layer, TOKENS, 3)
    out = torch.empty(routes.x.shape)
    step: Callable[[], object] = lambda: binding.run(routes.x, routes.ids, routes.weights, out=out)  # noqa: E731
    expected = check(layer, binding)
    assert each_failure("cpu", step, torch.OutOfMemoryError, most=30) > 10
    assert check(layer, binding) == expected  # nobody holds the scratch


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_torch_refuses_of_itself(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, plan, experts = prepared("plain", device)
    monkeypatch.setattr(type(plan), "required_nbytes", lambda _plan: 1 << 60)
    with pytest.raises(MoeMemoryError, match=f"scratch of {1 << 60} bytes cannot be had on {device}"):
        bind(plan, experts)
    monkeypatch.undo()
    check(layer, bind(plan, experts))


@pytest.fixture
def thawed() -> Iterator[Session]:
    session = Session()
    yield session
    session.thaw()


@pytest.mark.parametrize("number", range(4))
def test_memory_that_runs_out_while_a_kernel_is_made_ready(
    number: int, thawed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(
        make_layer(experts=5000, hidden=128, intermediate=128, rates=("1",)), device="cuda",
        limits=DeviceLimits("sm_90a", 132),
    )  # fmt: skip
    made: list[KernelKey] = []

    def make(key: KernelKey) -> None:
        if len(made) == number and not failed:
            failed.append(key)
            raise torch.OutOfMemoryError(_INJECTED)
        made.append(key)

    failed: list[KernelKey] = []
    monkeypatch.setattr(compiler, "compile_kernel", make)
    monkeypatch.setattr(compiler, "_load", make)
    with pytest.raises(torch.OutOfMemoryError, match=_INJECTED):
        thawed.prepare([plan])
    assert not thawed.frozen  # a server that went on would compile while it serves
    assert made == list(plan.compile_keys()[:number])
    thawed.prepare([plan])
    assert thawed.frozen
    assert made[number:] == list(plan.compile_keys())
