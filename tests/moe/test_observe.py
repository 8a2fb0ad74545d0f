"""Holds what a running layer tells of itself: a logger without handlers, and ranges only where they are wanted."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch

from moe.samples import bits, launch, make_binding, make_layer, make_plan, make_routes
from trellis_moe import bind, prepare_weights
from trellis_moe.observe import LOG, profile_range


def test_the_logger_is_the_packages_and_writes_nowhere_itself() -> None:
    assert LOG is logging.getLogger("trellis_moe")
    assert LOG.handlers == []


def test_binding_tells_its_plan_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(rates=("2",))
    plan = make_plan(layer)
    with caplog.at_level(logging.DEBUG, logger="trellis_moe"):
        make_binding(layer, plan)
    assert plan.explain() in caplog.text


def test_runs_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    layer = make_layer(rates=("2",))
    launch(make_binding(layer, make_plan(layer)), make_routes(layer, 2, 3))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("device", "marked"), [("cpu", 0), ("cuda", 1)])
def test_ranges_are_marked_where_they_are_seen(monkeypatch: pytest.MonkeyPatch, device: str, marked: int) -> None:
    seen: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            seen.append(name)

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_error: object) -> None:
            return None

    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    with profile_range("layer", torch.device(device)):
        pass
    assert seen == ["layer"] * marked


@pytest.mark.parametrize("wanted", [False, True])
def test_launches_are_marked_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    layer, seen = make_layer(rates=("2",)), list[str]()
    plan = make_plan(layer)

    def record(name: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
        seen.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr("trellis_moe.binding.profile_range", record)
    launch(bind(plan, prepare_weights(plan.weights, layer.weights), nvtx=wanted), make_routes(layer, 5, 3))
    assert seen == (["trellis op_by_op 5 of 9"] if wanted else [])


@pytest.mark.gpu
def test_ranges_change_no_bit() -> None:
    layer = make_layer(rates=("2",))
    plan, routes = make_plan(layer, device="cuda"), make_routes(layer, 5, 3)
    experts = prepare_weights(plan.weights, layer.weights, device="cuda")
    assert bits(launch(bind(plan, experts, nvtx=True), routes)) == bits(launch(make_binding(layer, plan), routes))
