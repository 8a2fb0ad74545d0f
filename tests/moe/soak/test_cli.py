"""Holds the soak command to its report and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trellis_kernels.cute import compiler
from trellis_moe.soak import cli
from trellis_moe.soak.report import SoakReport


def test_a_soak_reports_what_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "soak.json"
    assert cli.main(["--seconds", "0.1", "--runs", "30", "--device", "cpu", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == json.loads(path.read_text())
    report = SoakReport.model_validate_json(path.read_text())
    assert sum(report.runs.values()) >= 30
    assert report.seconds >= 0.1
    assert len(report.layers) == cli.SMALL.layers
    assert not compiler.is_frozen()  # a soak leaves the process as it was


def test_a_failure_is_told_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = cli.soak(cli.SMALL, torch.device("cpu"), seconds=0.0, runs=1)
    monkeypatch.setattr(cli, "soak", lambda *_sizes, **_options: report.model_copy(update={"mismatches": 3}))
    assert cli.main(["--device", "cpu"]) == 1
    assert "3 of 1 runs gave other bits" in capsys.readouterr().err


def test_arguments_that_are_none_end_with_exit_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--seconds", "long"])
    assert caught.value.code == 2
