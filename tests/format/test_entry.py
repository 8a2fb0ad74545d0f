"""Holds commands to one line for an interrupt whenever it comes, and for what they leave unanswered at their end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "some: out of memory\n"),
        (MemoryError("Unable to allocate 9 TiB"), "some: out of memory: Unable to allocate 9 TiB\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), "some: stdout cannot be written: No space left on device\n"),
    ],
)
def test_what_a_command_leaves_unanswered_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    def failing(arguments: list[str] | None) -> int:
        raise error

    monkeypatch.setattr(entry, "drop_output", lambda: None)  # stdout is pytest's here
    monkeypatch.setitem(sys.modules, "some.command", SimpleNamespace(main=failing))
    assert entry.run_command("some", "some.command", []) == 1
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file", "x"), ValueError("a defect")])
def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def failing(arguments: list[str] | None) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "some.command", SimpleNamespace(main=failing))
    with pytest.raises(type(error)):
        entry.run_command("some", "some.command", [])


def closed(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None


@pytest.mark.parametrize("numbers", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_process_without_streams_does_its_work(numbers: tuple[int, ...]) -> None:
    program = "import sys; from trellis_format.entry import main; sys.exit(main(['schema', 'inspect']))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, preexec_fn=closed(*numbers)
    )
    assert (done.returncode, done.stderr) == (0, b"")
