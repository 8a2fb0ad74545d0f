"""Holds the progress bar to silence: in the first second, off a terminal, where it is not wanted, and on stdout."""

from __future__ import annotations

import sys

import pytest

from trellis_moe.commands import progress
from trellis_moe.commands.progress import progress_bar


@pytest.mark.parametrize(
    ("enabled", "terminal", "seconds", "shown"),
    [(True, True, 2.0, True), (True, True, 0.5, False), (True, False, 2.0, False), (False, True, 2.0, False)],
)
def test_a_bar_shows_on_a_terminal_after_a_second(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    enabled: bool,
    terminal: bool,
    seconds: float,
    shown: bool,
) -> None:
    clock = iter([0.0, *([seconds] * 10_000)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    started: list[str] = []
    monkeypatch.setattr(progress.Progress, "start", lambda bar: started.append("start"))
    monkeypatch.setattr(progress.Progress, "stop", lambda bar: started.append("stop"))
    with progress_bar(enabled) as tell:
        tell("prepare", 1, 2)
        tell("run", 0, 0)
        tell("run", 1, 1)
    assert started == (["start", "stop"] if shown else [])
    assert capsys.readouterr().out == ""


def test_a_bar_is_taken_down_when_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *([9.0] * 10_000)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stopped: list[bool] = []
    monkeypatch.setattr(progress.Progress, "start", lambda bar: None)
    monkeypatch.setattr(progress.Progress, "stop", lambda bar: stopped.append(True))
    with pytest.raises(KeyboardInterrupt), progress_bar() as tell:  # noqa: PT012  # the failure is inside
        tell("run", 0, 1)
        raise KeyboardInterrupt
    assert stopped == [True]
