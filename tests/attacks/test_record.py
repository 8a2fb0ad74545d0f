"""Holds the page to its document, and the document to rows without silent cases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attacks.record import PAGE, Row, load_rows, render_page, save_rows


def row(**changes: object) -> Row:
    values = {"attack": "a", "seed": 3, "outcomes": {"refused": 2, "right": 1}, "seconds": 1.5, "command": "run a"}
    return Row(**(values | {"machine": "m"} | changes))  # type: ignore[arg-type]


def test_rows_are_kept_and_replaced_by_attack_and_command(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert load_rows(path) == []
    save_rows([row(), row(attack="b")], path)
    save_rows([row(seconds=9.0)], path)
    assert load_rows(path) == [row(seconds=9.0), row(attack="b")]


def test_what_was_silent_is_counted_and_shown() -> None:
    made = Row.of("a", 0, Counter(right=2), 1.23, "run a", [f"seed {i}" for i in range(12)])
    assert (made.outcomes, made.tried, len(made.silent)) == ({"right": 2, "silent": 12}, 14, 10)
    page = render_page([made, row()])
    assert "| a | 14 | 2 right, 12 silent | 1.2 | `run a` |" in page
    assert "| a | 3 | 2 refused, 1 right, 0 silent | 1.5 | `run a` |" in page


def test_the_page_is_made_of_the_document() -> None:
    assert PAGE.read_text() == render_page(load_rows())


def test_no_attack_ended_silently() -> None:
    rows = load_rows()
    assert rows
    assert [found.attack for found in rows if found.silent or found.outcomes.get("silent")] == []
