"""Holds the command to its exit codes, its two outputs, and the bytes that it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_set import DataSet
from prep.samples import open_layer, random_layer, write_checkpoint
from trellis_format.errors import FormatValueError
from trellis_prep import cli, plan_layout, rank_extent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with one layer of mixed rates and biases."""
    return write_checkpoint(tmp_path / "model", random_layer(biased=True))


def run(model: Path, *arguments: str) -> int:
    return cli.main(["prepare", "--checkpoint", str(model), *arguments])


def run_json(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> Any:
    assert run(model, "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_by_owner_are_those_of_the_layout(
    model: Path, capsys: pytest.CaptureFixture[str], dry: bool, rank: int
) -> None:
    options = ["--dry-run"] if dry else []
    document = run_json(capsys, model, "--tp-size", "2", "--tp-rank", str(rank), *options)
    _, source, _ = open_layer(model)
    layout = plan_layout(source, rank_extent(384, rank, 2))
    (layer,) = document["layers"]
    assert layer["owners"] == {"codes": layout.code_bytes} | layout.table_bytes
    assert ("bias.down" in layer["owners"]) == (rank == 0)
    assert (layer["first_channel"], layer["channels"]) == (256 * rank, layout.extent.width)
    assert layer["bytes"] == document["total"]["bytes"] == layout.total_bytes
    assert layer["seconds"] > 0
    assert document["dry_run"] == dry
    assert (document["sampled_bytes"] > 0) == dry


def test_text_has_owners_and_total(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model) == 0
    shown = capsys.readouterr().out
    _, source, _ = open_layer(model)
    for name, nbytes in plan_layout(source).table_bytes.items():
        assert f"  {name} " in shown
        assert f"{nbytes:,} bytes" in shown
    assert f"{plan_layout(source).total_bytes:,} bytes" in shown


def test_real_checkpoints_are_prepared(data_set: DataSet, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, data_set.checkpoints["tiny_3_mul1"], "--layers", "0-1", "--max-bytes", "200000")
    assert [layer["layer"] for layer in document["layers"]] == [0, 1]
    assert all(0 < layer["staging_bytes"] <= 200_000 for layer in document["layers"])


def test_cache_is_filled_and_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_json(capsys, model, "--cache", str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 1

    def refuse(*_: object) -> None:
        raise AssertionError("codes were read")

    monkeypatch.setattr("trellis_prep.loads.ShareReader.read", refuse)
    second = run_json(capsys, model, "--cache", str(tmp_path / "cache"))
    assert second["total"]["owners"] == first["total"]["owners"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "not a device"),
        (["--device", "cuda:77"], "cuda:77 is not there"),
        (["--max-bytes", "0"], "max_bytes must be positive"),
        (["--max-experts", "-2"], "max_experts must be positive"),
        (["--layers", "5"], "layers 5 have no experts; those that have: 0"),
        (["--tp-rank", "1"], r"--tp-rank 1 is outside 0..0"),
        (["--tp-size", "0"], "--tp-size must be at least 1, got 0"),
        (["--device", "bogus"], "'bogus' is not a device; give cpu, cuda or cuda:N"),
        (["--cache", "/dev/null"], "--cache /dev/null: a cache is a folder, and this is none"),
    ],
)
def test_wrong_use_exits_with_2(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(model, *arguments) == cli.EXIT_UNUSABLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("trellis-prep: ")
    assert message in captured.err


@pytest.mark.parametrize("arguments", [["--layers", "x"], ["--layers", "3-1"], ["--tp-size", "two"], ["--wrong"]])
def test_arguments_that_cannot_be_read_exit_with_2(model: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(model, *arguments)
    assert caught.value.code == 2


def test_checkpoint_that_cannot_be_opened_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none") == cli.EXIT_UNUSABLE
    assert "no such checkpoint directory" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert run(tmp_path) == cli.EXIT_UNUSABLE


def test_a_cache_that_cannot_be_written_is_told_in_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--cache", "/proc/cache") == cli.EXIT_OK
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trellis-prep: warning: share is not cached: /proc/cache/")


@pytest.mark.parametrize("dry", [False, True])
def test_any_number_of_readers_is_cut_to_the_slots(model: Path, capsys: pytest.CaptureFixture[str], dry: bool) -> None:
    assert run(model, "--readers", "99999999", *(["--dry-run"] if dry else [])) == cli.EXIT_OK
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("dry", [True, False])
def test_layer_that_cannot_be_prepared_exits_with_1(model: Path, capsys: pytest.CaptureFixture[str], dry: bool) -> None:
    options = ["--dry-run"] if dry else []
    assert run(model, "--tp-size", "4", *options) == cli.EXIT_FAILED
    assert "world size must be 1 to 3" in capsys.readouterr().err
    assert run(model, "--max-bytes", "1000", *options) == cli.EXIT_FAILED
    assert "insufficient" in capsys.readouterr().err


def test_escapes_of_a_foreign_name_do_not_reach_the_terminal(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FormatValueError("truncated", file="a\x1b[2Jb")

    monkeypatch.setattr(cli, "prepare", fail)
    assert run(model) == cli.EXIT_FAILED
    assert capsys.readouterr().err == "trellis-prep: a\\x1b[2Jb: truncated\n"


def test_interrupt_exits_with_130(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "prepare", interrupt)
    assert run(model) == cli.EXIT_INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_module_runs_and_survives_a_reader_that_stops(model: Path) -> None:
    command = [sys.executable, "-m", "trellis_prep", "prepare", "--checkpoint", str(model), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(60), errors) == (0, b"")


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("trellis-prep ")
