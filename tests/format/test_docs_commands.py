"""Holds the console examples of docs/format-commands.md to what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trellis_format.cli import main

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/format-commands.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def stable(text: str) -> str:
    """Output without the bytes of files that state this package's version."""
    return re.sub(r"(exl3|exl3-v1|  file    ) ?,? [0-9,]+ bytes", r"\1 bytes", text)


def examples() -> list[tuple[str, str]]:
    """Each command and what is shown below it, in order."""
    found = []
    for block in BLOCK.findall(DOCUMENT.read_text()):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def test_examples_print_what_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(examples()) >= 8
    for command, output in examples():
        program, *arguments = shlex.split(command)
        assert program == "trellis-format"
        main(arguments)
        captured = capsys.readouterr()
        assert stable(captured.out + captured.err) == stable(output), command


def test_every_command_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.search(r"COMMAND\n((?:    \w+ .*\n(?:      .*\n)*)+)", capsys.readouterr().out)
    assert listed is not None
    names = set(re.findall(r"^    (\w+) ", listed[1], re.MULTILINE)) - {"schema"}
    assert names == set(re.findall(r"^## (\w+):", DOCUMENT.read_text(), re.MULTILINE))
