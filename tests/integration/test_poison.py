"""Holds the poison to every way in which torch hands out memory, so that a run under it means what it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import poison

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def poisoned() -> Iterator[None]:
    class Config:
        cleanups: list[object] = []  # noqa: RUF012  # lives for one test

        def addinivalue_line(self, _name: str, _line: str) -> None:
            """Warnings are of no interest here."""

        def add_cleanup(self, cleanup: object) -> None:
            self.cleanups.append(cleanup)

    was = poison.is_poisoned()
    poison.pytest_configure(Config())  # type: ignore[arg-type]
    yield
    if not was:
        Config.cleanups[-1]()  # type: ignore[operator]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("poisoned")
def test_memory_that_nobody_wrote_is_nan(device: str) -> None:
    like = torch.zeros(64, device=device)
    ways = (
        torch.empty(64, device=device),
        torch.empty(64, dtype=torch.float16, device=device),
        torch.empty_like(like),
        like.new_empty(64),
        torch.empty_strided((8, 8), (8, 1), device=device),
        torch.empty(256, dtype=torch.uint8, device=device).view(torch.float32),
        torch.empty(64, dtype=torch.bfloat16, device=device).resize_(96),
    )
    assert all(bool(way.isnan().all()) for way in ways)
    assert int(torch.empty(4, dtype=torch.int64, device=device).min()) == 2**63 - 1
    assert poison.pytest_report_header() == "poison: nan"


def test_without_the_plugin_there_is_no_poison(request: pytest.FixtureRequest) -> None:
    assert poison.is_poisoned() == request.config.pluginmanager.has_plugin("poison")
