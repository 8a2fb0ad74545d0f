"""Holds the soak command to its report and its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trellis_kernels.cute import compiler
from trellis_moe.soak import cli
from trellis_moe.soak.report import SoakReport


def test_a_soak_reports_what_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trellis_moe.soak")
    path = tmp_path / "soak.json"
    assert cli.main(["--seconds", "0.1", "--runs", "30", "--device", "cpu", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "the load begins" in caplog.text
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_load_and_what_held_is_told(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trellis_moe.soak", "--seconds", "600", "--runs", "1", "--device", "cpu"]
    path = tmp_path / "soak.json"
    with subprocess.Popen([*command, "--json", str(path)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("the load begins" in line for line in process.stderr)
        process.send_signal(number)
        told = process.stderr.read()
    assert process.returncode == 1
    assert "of 600.0 seconds" in told
    report = SoakReport.model_validate_json(path.read_text())
    assert sum(report.runs.values()) >= 1
    assert not report.mismatches
    assert report.seconds < 600


def test_arguments_that_are_none_end_with_exit_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--seconds", "long"])
    assert caught.value.code == 2
