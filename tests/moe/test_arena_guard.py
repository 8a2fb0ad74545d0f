"""Holds an arena to one run at a time, and other arenas to running beside it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from moe.samples import Layer, bits, launch, make_layer, make_plan, make_routes
from trellis_moe import Binding, MoeValueError, bind, prepare_weights
from trellis_moe.arena_guard import guard_of


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("2",))


def pair(layer: Layer, apart: bool) -> list[Binding]:
    """Two bindings, in one arena or in two."""
    plan = make_plan(layer)
    experts = prepare_weights(plan.weights, layer.weights)
    arenas = [torch.empty(plan.required_nbytes(), dtype=torch.uint8) for _ in range(2)]
    return [bind(plan, experts, arenas[index if apart else 0]) for index in range(2)]


def test_bindings_of_one_arena_have_one_guard(layer: Layer) -> None:
    arena = torch.empty(64, dtype=torch.uint8)
    guard = guard_of(arena)
    assert guard_of(arena[:32]) is guard
    assert guard_of(arena[16:]) is not guard
    assert guard_of(torch.empty(64, dtype=torch.uint8)) is not guard
    seen = weakref.ref(guard)
    del guard
    gc.collect()
    assert seen() is None  # a guard lives as long as a binding that has it


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_inside_a_run_needs_scratch_of_its_own(layer: Layer, apart: bool) -> None:
    outer, inner = pair(layer, apart)
    routes, done = make_routes(layer, 3, 3), list[bytes]()

    def again(_done: int, _total: int) -> None:
        if not done:
            done.append(bits(launch(inner, routes)))

    arguments = {"out": torch.empty(3, 256), "progress": again}
    if apart:
        outer.run(routes.x, routes.ids, routes.weights, **arguments)
        assert done == [bits(launch(outer, routes))]
    else:
        with pytest.raises(MoeValueError, match=r"scratch at byte \d+ is in use by a run of thread 'MainThread'"):
            outer.run(routes.x, routes.ids, routes.weights, **arguments)
    assert bits(launch(outer, routes)) == bits(launch(inner, routes))  # the arena is free again, also after a refusal


def test_another_thread_is_refused_by_name(layer: Layer) -> None:
    outer, inner = pair(layer, apart=False)
    routes, entered, leave, seen = make_routes(layer, 3, 3), threading.Event(), threading.Event(), list[str]()

    def hold(_done: int, _total: int) -> None:
        entered.set()
        leave.wait(10)

    def work() -> None:
        outer.run(routes.x, routes.ids, routes.weights, out=torch.empty(3, 256), progress=hold)

    thread = threading.Thread(target=work, name="first")
    thread.start()
    assert entered.wait(10)
    try:
        launch(inner, routes)
    except MoeValueError as error:
        seen.append(str(error))
    leave.set()
    thread.join(30)
    assert len(seen) == 1
    assert "thread 'first'" in seen[0]
    launch(inner, routes)
