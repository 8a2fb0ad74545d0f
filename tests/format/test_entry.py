"""Holds the start of commands to one line and code 130 for an interrupt, whenever it comes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from interrupts import interrupted_start
from trellis_format import cli, entry


@pytest.mark.parametrize("library", ["numpy", "pydantic"])
def test_an_interrupt_while_a_library_loads_is_one_line(library: str) -> None:
    done = interrupted_start("trellis_format.entry", ["inspect", "."], library)
    assert done == (130, "", "trellis-format: interrupted\n")


def test_the_command_is_that_of_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda arguments: len(arguments))
    assert entry.main(["a", "b"]) == 2


def test_any_module_is_run_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: list[str] | None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(
        sys.modules, "some.command", SimpleNamespace(main=lambda arguments: 7 if arguments is None else 8)
    )
    assert entry.run_command("some", "some.command") == 7
    assert entry.run_command("some", "some.command", []) == 8
    monkeypatch.setitem(sys.modules, "some.command", SimpleNamespace(main=interrupted))
    assert entry.run_command("some", "some.command", []) == 130
    assert capsys.readouterr() == ("", "some: interrupted\n")
    with pytest.raises(ModuleNotFoundError, match="some_absent"):  # a broken installation is no interrupt
        entry.run_command("some", "some_absent")
