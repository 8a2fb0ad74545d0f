"""Holds the loops of kills to a few kills in the suite, and to seeing what a bad victim leaves behind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks import kills
from attacks.kills import VICTIMS, kill_loop


@pytest.mark.parametrize("word", sorted(VICTIMS))
def test_runs_after_a_kill_are_sound(word: str, tmp_path: Path) -> None:
    row = kill_loop(word, tmp_path, kills=4, seed=1000)
    assert row.silent == []
    assert sum(count for name, count in row.outcomes.items() if name.startswith("SIG")) == 4
    assert row.command == f"python -m attacks kill {word} --count 4 --seed 1000"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda folder: (folder / "digest").write_text(str(time.time_ns())), "the result differs"),
        (lambda folder: (folder / "stray").touch(), "left behind: stray"),
        (lambda folder: (folder / f"model/{time.time_ns()}").touch(), "the checkpoint changed"),
    ],
)
def test_what_a_bad_victim_does_is_told(
    fault: Callable[[Path], object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> None:
        sound.run(folder)
        fault(folder)

    sound = VICTIMS["prepare"]
    monkeypatch.setitem(VICTIMS, "prepare", dataclasses.replace(sound, run=run))
    row = kill_loop("prepare", tmp_path, kills=1, seed=0)
    assert told in row.silent[0]
    assert row.outcomes["silent"] >= 1


def test_a_victim_that_fails_ends_the_loop_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise ValueError("no luck")

    (tmp_path / "work").mkdir()
    monkeypatch.setitem(VICTIMS, "prepare", dataclasses.replace(VICTIMS["prepare"], run=fail))
    with pytest.raises(RuntimeError, match="failed with status 1: ValueError: no luck"):
        kill_loop("prepare", tmp_path / "work", kills=1, seed=0)


def test_a_victim_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(kills, "_PATIENCE", 0.2)
    monkeypatch.setitem(VICTIMS, "prepare", dataclasses.replace(VICTIMS["prepare"], run=lambda _: time.sleep(60)))
    with pytest.raises(RuntimeError, match=r"still running after 0\.2 s"):
        kill_loop("prepare", tmp_path / "work", kills=1, seed=0)
