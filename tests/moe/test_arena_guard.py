"""Holds an arena to one run at a time, and other arenas to running beside it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from moe.samples import Layer, bits, launch, make_layer, make_plan, make_routes
from trellis_moe import Binding, MoeValueError, arena_guard, bind, prepare_weights
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


def test_bindings_of_one_arena_have_one_guard() -> None:
    arena = torch.empty(64, dtype=torch.uint8)
    guard = guard_of(arena)
    assert guard_of(arena[:]) is guard
    assert guard_of(arena[16:]) is not guard
    assert guard_of(torch.empty(64, dtype=torch.uint8)) is not guard
    seen = weakref.ref(guard)
    del guard
    gc.collect()
    assert seen() is None  # a guard lives as long as a binding that has it


def test_arenas_that_overlap_are_in_use_together_and_others_are_not() -> None:
    arena = torch.empty(96, dtype=torch.uint8)
    spans = [(0, 32), (0, 64), (0, 96), (32, 64), (32, 96), (64, 96)]
    parts = {(first, last): guard_of(arena[first:last]) for first, last in spans}
    for (first, last), guard in parts.items():
        with guard:
            for (begin, end), other in parts.items():
                if begin < last and first < end:
                    with pytest.raises(MoeValueError, match="in use by a run of thread 'MainThread'"), other:
                        pass
                else:
                    with other:
                        pass
        with guard:  # a refusal leaves it free
            pass


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


class Stream:
    """Stands for a CUDA stream: notes what it waits for."""

    def __init__(self, captures: bool = False) -> None:
        self.captures = captures
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_run_waits_for_other_streams_alone_and_never_across_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, captured = Stream(), Stream(), Stream(captures=True)
    now: list[Stream] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: now[-1])
    monkeypatch.setattr(arena_guard, "_captures", lambda stream: stream.captures)
    device = torch.device("cuda", 0)
    guard, beside = (arena_guard.ArenaGuard(device, span) for span in ((0, 64), (32, 96)))
    guard.beside.add(beside)
    beside.beside.add(guard)
    for stream, held in ((first, guard), (first, guard), (second, guard), (captured, guard), (second, beside)):
        now.append(stream)
        with held:
            pass
    assert (first.waited, second.waited, captured.waited) == ([], [first], [])
    captured.captures = False  # the capture has ended, so that its stream is one like any other
    now.append(first)
    with beside:
        pass
    assert [id(stream) for stream in first.waited] == [id(second), id(captured)]


@pytest.mark.gpu
@pytest.mark.parametrize("overlapping", [False, True], ids=["same bytes", "some bytes"])
def test_gpu_a_run_on_another_stream_waits_for_the_last_one(layer: Layer, overlapping: bool) -> None:
    """One stream is held up before its run; a run that did not wait for it would end before it begins."""
    plan = make_plan(layer, tokens=300, device="cuda")
    experts = prepare_weights(plan.weights, layer.weights, device="cuda")
    nbytes = plan.required_nbytes()
    arena = torch.empty(nbytes + 256, dtype=torch.uint8, device="cuda")
    parts = arena[:nbytes], arena[256:] if overlapping else arena[:nbytes]
    bindings = [bind(plan, experts, part) for part in parts]
    given = [[t.cuda() for t in vars(make_routes(layer, 300, 3, seed=seed)).values()] for seed in (1, 2)]
    expected = [bindings[0].run(*each, out=torch.empty(300, 256, device="cuda")).clone() for each in given]
    outs = [torch.full((300, 256), float("nan"), device="cuda") for _ in given]
    streams = [torch.cuda.Stream() for _ in given]
    for first in (0, 1):
        ends = [torch.cuda.Event(enable_timing=True) for _ in given]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[first]):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
        for index in (first, 1 - first):
            with torch.cuda.stream(streams[index]):
                bindings[index].run(*given[index], out=outs[index])
                ends[index].record()
        torch.cuda.synchronize()
        assert ends[first].elapsed_time(ends[1 - first]) > 0
    assert [bits(out) for out in outs] == [bits(each) for each in expected]
