"""Holds what a running layer tells of itself: a logger without handlers, and ranges only where they are wanted."""

from __future__ import annotations

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


@pytest.mark.parametrize(("wanted", "device", "marked"), [(False, "cuda", 0), (True, "cpu", 0), (True, "cuda", 1)])
def test_ranges_are_marked_where_they_are_wanted_and_seen(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, device: str, marked: int
) -> None:
    seen: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            seen.append(name)

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_error: object) -> None:
            return None

    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    with profile_range("layer", wanted=wanted, device=torch.device(device)):
        pass
    assert seen == ["layer"] * marked


@pytest.mark.gpu
def test_ranges_change_no_bit() -> None:
    layer = make_layer(rates=("2",))
    plan, routes = make_plan(layer, device="cuda"), make_routes(layer, 5, 3)
    experts = prepare_weights(plan.weights, layer.weights, device="cuda")
    assert bits(launch(bind(plan, experts, nvtx=True), routes)) == bits(launch(make_binding(layer, plan), routes))
