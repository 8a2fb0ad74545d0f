"""Holds the command to its exit codes, its report, and ranks that torchrun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trellis_moe.dist_check.cli import main


def test_ranks_of_torchrun_write_one_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trellis_moe.dist_check")
    done = subprocess.run(
        [sys.executable, "-m", *command, "--device", "cpu", "--tokens", "1", "4", "--json", str(path)],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 ranks of cpu over gloo: ok"
    assert "ep: at most 0.0e+00 relative L2, no bit differs" in done.stdout
    report = json.loads(path.read_text())
    assert (report["ok"], report["world_size"], report["backend"]) == (True, 2, "gloo")
    assert {(each["rank"], each["mode"]) for each in report["agreements"]} == {(0, "eager"), (1, "eager")}
    assert {each["tokens"] for each in report["agreements"]} == {1, 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--launch", "0"], "--launch must be at least 1, got 0"),
        (["--device", "cpu"], "start the ranks with torchrun or with --launch N"),
    ],
)
def test_wrong_use_is_one_line_and_two(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("dist_check: error: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_rank_that_is_not_there_cannot_be_killed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--launch", "1", "--kill-rank", "0", "--device", "cpu"]) == 1
    assert "rank 0 was to be killed and ended with 2" in capfd.readouterr().err


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_agree_with_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["--launch", "2", "--share-gpus", "--tokens", "1", "64", "--json", str(path)]) == 0, capfd.readouterr()
    assert json.loads(path.read_text())["ok"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("loss", [False, True], ids=["agreement", "loss"])
def test_ranks_with_a_gpu_each(loss: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if loss:
        assert main(["--launch", "2", "--kill-rank", "1", "--timeout", "15"]) == 0, capfd.readouterr()
        return
    path = tmp_path / "report.json"
    assert main(["--launch", "2", "--json", str(path)]) == 0, capfd.readouterr()
    report = json.loads(path.read_text())
    assert report["backend"] == "nccl"
    assert {each["mode"] for each in report["agreements"]} == {"eager", "graph"}
