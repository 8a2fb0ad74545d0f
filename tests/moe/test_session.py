"""Holds sessions to compiling everything beforehand and nothing afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from moe.samples import Layer, make_binding, make_layer, make_plan
from trellis_kernels import ColdKernelError
from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import DeviceLimits
from trellis_moe import ExecutionPlan, MoeTypeError, Session
from trellis_moe.session import make_ready

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


@pytest.fixture
def layer() -> Layer:
    return make_layer(rates=("3",))


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.thaw()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelKey]:
    """The keys that are compiled, without compiling them."""
    seen: list[KernelKey] = []

    def precompile(
        keys: Iterable[KernelKey], *, jobs: int | None = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        wanted = list(keys)
        for done, key in enumerate(wanted, start=1):
            seen.append(key)
            if progress is not None:
                progress(done, len(wanted))

    monkeypatch.setattr(compiler, "precompile", precompile)
    monkeypatch.setattr(compiler, "cold", lambda keys: tuple(key for key in keys if key not in seen))
    return seen


def hopper(layer: Layer, **options: int) -> ExecutionPlan:
    return make_plan(layer, device="cuda", limits=HOPPER, **options)


def test_every_kernel_of_the_plans_is_compiled_once_and_then_no_more(
    layer: Layer, session: Session, compiled: list[KernelKey]
) -> None:
    plans, steps = [hopper(layer), hopper(layer, tokens=900), hopper(layer)], list[tuple[int, int]]()
    assert not session.frozen
    session.prepare(plans, progress=lambda *step: steps.append(step))
    assert session.frozen
    assert compiled == list(dict.fromkeys(key for plan in plans for key in plan.compile_keys()))
    assert steps == [(done, len(compiled)) for done in range(1, len(compiled) + 1)]
    make_ready(plans[1])  # nothing is missing
    session.prepare([hopper(layer, top_k=5)])  # further plans may follow
    assert compiled[-1] in hopper(layer, top_k=5).compile_keys()


def test_a_plan_that_was_not_prepared_is_refused_with_its_key(
    layer: Layer, session: Session, compiled: list[KernelKey]
) -> None:
    session.prepare([hopper(layer)])
    other = hopper(make_layer(codebook="mcg", rates=("4",)))
    with pytest.raises(ColdKernelError) as caught:
        make_ready(other)
    (key,) = other.compile_keys()
    assert repr(key) in str(caught.value)
    assert "Session.prepare()" in str(caught.value)
    session.thaw()
    make_ready(other)
    assert key in compiled


def test_plans_without_kernels_bind_at_any_time(layer: Layer, session: Session) -> None:
    count = session.kernel_count
    session.prepare([])
    plan = make_plan(layer)
    assert plan.compile_keys() == ()
    make_binding(layer, plan)
    session.prepare([plan])
    assert session.kernel_count == count


def test_something_else_than_a_plan_is_refused(layer: Layer, session: Session) -> None:
    with pytest.raises(MoeTypeError, match="plan must be an ExecutionPlan or a ParallelPlan, got WeightPlan"):
        session.prepare([make_plan(layer).weights])  # type: ignore[list-item]
    assert not session.frozen
