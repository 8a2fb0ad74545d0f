"""Holds `trellis-format synth` to its arguments, what it prints and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trellis_format.cli import main
from trellis_format.inspect import inspect_checkpoint

SIZES = ["--hidden", "128", "--intermediate", "256", "--experts", "3"]


def test_arguments_reach_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    more = ["--layers", "2", "--rates", "2, 4", "--mix", "layer", "--codebook", "mcg", "--naming", "mixtral"]
    more += ["--shards", "2", "--seed", "9", "--dense", "--top-k", "1", "--json"]
    assert main(["synth", str(out), *SIZES, *more]) == 0
    value = json.loads(capsys.readouterr().out)
    report = inspect_checkpoint(out)
    assert value == {
        "schema": "trellis-format/synth",
        "schema_version": 1,
        "path": str(out),
        "container": "exl3",
        "tensors": sum(shard.tensors for shard in report.shards),
        "bytes": report.bytes.total,
        "codebook": "mcg",
        "rates": ["2", "4"],
        "seed": 9,
    }
    assert (report.model.model_type, report.model.top_k, len(report.shards)) == ("mixtral", 1, 2)
    assert len(report.layers) == 2
    assert report.bytes.head > 0


def test_defaults_and_one_line_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["synth", str(out), *SIZES[:-1], "1", "--sparse"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"wrote {out}: 13 tensors, ")
    assert captured.err == ""
    (layer,) = inspect_checkpoint(out).layers
    assert {rate for part in layer.projections for rate in part.rates} == {"3"}
    assert inspect_checkpoint(out).model.top_k == 1


@pytest.mark.parametrize(("container", "codebook"), [("exl3-v1", "lut_e4m3"), ("native", "mul1")])
def test_other_containers(tmp_path: Path, capsys: pytest.CaptureFixture[str], container: str, codebook: str) -> None:
    out = str(tmp_path / "out")
    assert main(["synth", out, *SIZES, "--container", container, "--codebook", codebook, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["container"] == container
    assert main(["validate", out, "--data"]) == 0
    assert capsys.readouterr().out.startswith(f"{container}: ")


def test_what_a_container_cannot_hold_is_a_complaint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synth", str(tmp_path / "out"), *SIZES, "--container", "exl3-v1"]) == 1
    assert "cannot hold it: codebook mul1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--rate", "9"], "bitrate K = 9 is not legal"),
        (["--rate", "2.5", "--codebook", "mcg"], "no half rate"),
        (["--layers", "0"], "layers 0 is below 1"),
        (["--shards", "0"], "shards 0 is below 1"),
        (["--top-k", "999"], "top_k 999 exceeds the "),
        (["--hidden", "1000000000000"], "1000000000000 hidden channels exceed the bound of 131072"),
        (["--intermediate", "131073"], "131073 intermediate channels exceed the bound"),
        (["--layers", "9999999"], "linears in 9999999 layers"),
        (["--experts", "80000", "--hidden", "1000"], "80000000 router weights"),
        (["--shards", "1000000"], "1000000 shards exceed the bound of 100000"),
        (["--rates", "3,x"], "is not a number"),
    ],
)
def test_wrong_values_are_complaints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    assert main(["synth", str(tmp_path / "out"), *SIZES, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_destination_is_a_complaint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("")
    assert main(["synth", str(tmp_path), *SIZES]) == 2
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
