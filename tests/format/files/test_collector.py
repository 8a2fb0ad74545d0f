"""Holds the pause of the collector to its block, nested, after an error, and where it was off already."""

from __future__ import annotations

import gc

import pytest

from trellis_format.files.collector import paused_collector


@pytest.fixture(autouse=True)
def _collector() -> object:
    gc.enable()
    yield
    gc.enable()


def test_the_collector_is_off_inside_alone() -> None:
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    @paused_collector()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()
