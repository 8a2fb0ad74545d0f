"""Holds the commands to their exit codes and their outputs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from trellis_kernels import cli
from trellis_kernels.cute import compiler, report
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.cute.report import KernelReport, compile_reports
from trellis_kernels.selfcheck import Check

KEY = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=3, out_dtype="float32")


def run(*arguments: str) -> int:
    return cli.main(["compile", "--arch", "sm_90a", *arguments])


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch):
    """Make every compilation end in a given report."""

    def set_outcome(**fields: object) -> None:
        monkeypatch.setattr(
            cli, "compile_reports", lambda keys, jobs: (KernelReport(key, 0.5, **fields) for key in keys)
        )

    return set_outcome


def test_json_has_the_key_and_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    assert run("--match", "mul1 K=1.5 float32", "--jobs", "1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["kernels"]
    assert (document["failed"], document["spilled"]) == (0, 0)
    key = {name: row[name] for name in ("kernel", "arch", "codebook", "half_bits", "out_dtype")}
    assert key == {"kernel": "decode", "arch": "sm_90a", "codebook": "mul1", "half_bits": 3, "out_dtype": "float32"}
    assert 16 < row["registers"] < 64
    assert (row["stack_bytes"], row["shared_bytes"], row["error"]) == (0, 9216, None)


def test_workers_compile_what_one_process_compiles() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    keys = [DecodeKey("sm_90a", codebook, 8, "float16") for codebook in ("3inst", "mcg", "mul1")]

    def costs(jobs: int) -> dict[DecodeKey, tuple[int, int]]:
        return {found.key: (found.registers, found.code_bytes) for found in compile_reports(keys, jobs=jobs)}

    assert costs(2) == costs(1)
    assert costs(1).keys() == set(keys)


def test_spill_fails(outcome, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(registers=40, stack_bytes=16)
    assert run("--match", "K=1.5") == 1
    assert "3 kernels, 0 failed, 3 spilled" in capsys.readouterr().out


def test_failure_is_shown_and_fails(outcome, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(error="RuntimeError: ptxas said no")
    assert run("--match", "mcg K=4 float16") == 1
    printed = capsys.readouterr().out
    assert "decode sm_90a mcg K=4 float16  failed: RuntimeError: ptxas said no" in printed
    assert "1 kernels, 1 failed, 0 spilled" in printed


def test_clean_table_passes(outcome, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(registers=33, shared_bytes=1234)
    assert run("--match", "mcg K=4 float16") == 0
    header, row, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "registers", "stack_bytes", "shared_bytes", "code_bytes"]
    assert row.split() == ["decode", "sm_90a", "mcg", "K=4", "float16", "33", "0", "1234", "0"]
    assert last == "1 kernels, 0 failed, 0 spilled"


def test_costs_are_held_to_a_table(outcome, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table, selected = tmp_path / "costs.json", ("--match", "mcg K=4 float16")
    outcome(registers=33)
    assert run(*selected, "--table", str(table)) == 1
    assert "not a table of kernel costs" in capsys.readouterr().err
    assert run(*selected, "--table", str(table), "--write-table") == 0
    assert run(*selected, "--table", str(table)) == 0
    outcome(registers=34)
    assert run(*selected, "--table", str(table)) == 1
    assert "decode sm_90a mcg K=4 float16: registers 33 -> 34" in capsys.readouterr().err


def test_an_exception_becomes_the_error_of_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key: DecodeKey) -> bytes:
        raise RuntimeError(f"no {key.codebook} today")

    monkeypatch.setattr(compiler, "build_cubin", fail)
    found = report.report_kernel(KEY)
    assert found.error == "RuntimeError: no mul1 today"
    assert not found.is_good


def test_nothing_selected_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--match", "K=9") == 1
    assert "K=9" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--arch", "sm_70"), ("--jobs", "0"), ("--jobs", "x")])
def test_wrong_arguments_exit_with_2(arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("outcomes", "status", "last"), [(["ok", "skipped: no"], 0, "all good"), (["ok", "off"], 1, "1 failed")]
)
def test_selfcheck_prints_a_row_for_each_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcomes: list[str], status: int, last: str
) -> None:
    checks = [Check("decode", f"case {index}", "cpu", outcome) for index, outcome in enumerate(outcomes)]
    monkeypatch.setattr(cli, "run_checks", lambda device: iter(checks))
    assert cli.main(["selfcheck", "--device", "cpu"]) == status
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=4)[-1] for line in printed[-3:-1]] == outcomes
    assert printed[-1] == last


def test_selfcheck_of_a_device_that_is_not_there_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["selfcheck", "--device", "cuda:1"]) == 1
    assert "no CUDA device for cuda:1" in capsys.readouterr().err


def test_cache_is_counted_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.o", "b.o"):
        (tmp_path / name).write_bytes(bytes(1500))
    assert cli.main(["cache", "info", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 2 kernels, 3,000 of 1,073,741,824 bytes\n"
    assert cli.main(["cache", "clear", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"removed 2 kernels from {tmp_path}\n"
    assert not list(tmp_path.iterdir())


def test_cache_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "default_cache", lambda: None)
    assert cli.main(["cache", "info"]) == 1
    assert "TRELLIS_KERNELS_CACHE is off" in capsys.readouterr().err


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    path = Path(__file__).resolve().parents[2] / "packages/trellis-kernels/pyproject.toml"
    version = tomllib.loads(path.read_text())["project"]["version"]
    assert capsys.readouterr().out == f"trellis-kernels {version}\n"


def test_an_interrupt_is_one_line_and_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(device: torch.device) -> list[Check]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_checks", interrupt)
    assert cli.main(["selfcheck", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "trellis-kernels: interrupted\n"
