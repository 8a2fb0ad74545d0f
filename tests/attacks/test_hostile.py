"""Holds hostile checkpoints to own errors or right outputs, and the attacks to seeing what is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from attacks import hostile
from attacks.hostile import CASES, FAMILIES, Silent, run_family
from trellis_format.errors import FormatValueError

COUNTS = {"mutants": 40, "extremes": 4}


@pytest.mark.parametrize("word", sorted(FAMILIES))
def test_cases_of_every_family_end_well(word: str, tmp_path: Path) -> None:
    row = run_family(word, tmp_path, count=COUNTS.get(word, 25), seed=5000)
    assert row.silent == []
    assert row.tried == COUNTS.get(word, 25)
    assert row.command == f"python -m attacks hostile {word} --count {row.tried} --seed 5000"


def test_the_sound_checkpoint_runs_and_is_right(tmp_path: Path) -> None:
    assert hostile._take(hostile._written(tmp_path)) == "right"


@pytest.mark.parametrize("number", range(len(CASES["headers"])))
def test_every_header_of_the_corpus_is_refused_or_right(number: int, tmp_path: Path) -> None:
    class Chosen(random.Random):
        def choice(self, items):  # type: ignore[no-untyped-def]
            return items[number] if items is CASES["headers"] else super().choice(items)

    rng = Chosen(number)
    rng.random = lambda: 1.0  # type: ignore[method-assign]  # the length is the true one
    assert hostile._outcome(hostile._header, tmp_path / "x", rng) in ("refused", "right")


def test_wrong_outputs_and_foreign_errors_and_strays_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = hostile.moe_forward
    monkeypatch.setattr(hostile, "moe_forward", lambda *arguments, **options: 1.1 * honest(*arguments, **options))
    with pytest.raises(Silent, match=r"off by 0\.09\d* of the truth"):
        hostile._take(hostile._written(tmp_path))
    for case, told in (
        (lambda folder, rng: {}["x"], "KeyError: 'x'"),
        (lambda folder, rng: (folder / ".out.partial").mkdir() or "right", "Silent: wrote .out.partial"),
    ):
        monkeypatch.setitem(FAMILIES, "headers", ("a bad case", case))
        row = run_family("headers", tmp_path, count=1, seed=0)
        assert row.silent == [f"seed 0: {told}"]


def test_own_errors_are_refusals(tmp_path: Path) -> None:
    def refuse(folder: Path, rng: random.Random) -> str:
        (folder / "a").mkdir()
        (folder / "a/link").symlink_to("nowhere")
        raise FormatValueError("no")

    assert hostile._outcome(refuse, tmp_path / "x", random.Random(0)) == "refused"
    assert list(tmp_path.iterdir()) == []
