"""Holds what commands write to streams that close, fail, lack letters or are terminals."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from trellis_format.commands.streams import (
    EXIT_ERRORS,
    EXIT_OK,
    EXIT_UNUSABLE,
    complain,
    counted,
    emit,
    emit_json,
    progress,
)


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(), EXIT_ERRORS), (OSError(28, "full"), EXIT_UNUSABLE)])
def test_the_exit_code_of_a_stdout_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, code: int
) -> None:
    def fail() -> None:
        raise error

    with open(os.devnull, "w") as spare:
        monkeypatch.setattr(sys, "stdout", spare)
        assert emit(fail, EXIT_ERRORS) == code
    told = "trellis-format: stdout cannot be written: full\n"
    assert capsys.readouterr().err == (told if code == EXIT_UNUSABLE else "")


def test_json_is_ascii_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert emit_json({"name": "é\x1b[31m"}, EXIT_OK) == EXIT_OK
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out) == {"name": "é\x1b[31m"}


def test_complaints_are_one_escaped_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain("a\x1b[2Jb\u202ec")
    assert capsys.readouterr().err == "trellis-format: a\\x1b[2Jb\\u202ec\n"


def test_no_bar_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("x") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_where_rich_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress("sound") as report:
        for done in range(5):
            report(done, 4)
    assert "sound" in terminal.getvalue()


def test_no_bar_where_rich_is_not_there_or_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress("x", show=False) as report:
        report(1, 2)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress("x") as report:
        report(1, 2)
    assert terminal.getvalue() == ""


def test_pieces_are_added_up() -> None:
    told: list[tuple[int, int]] = []
    advance = counted(lambda *pair: told.append(pair), 10)
    for piece in (3, 4, 3):
        advance(piece)
    assert told == [(3, 10), (7, 10), (10, 10)]
