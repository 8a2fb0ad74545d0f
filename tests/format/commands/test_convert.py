"""Holds `trellis-format convert` to its arguments, what it prints and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, write_checkpoint
from trellis_format.cli import main

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


def made(folder: Path, **options: Any) -> str:
    rng = np.random.default_rng(0)
    tensors = random_layer(rng, **options) | random_layer(rng, layer=3, **options)
    return str(write_checkpoint(folder / "in", tensors, config=CONFIG))


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = made(tmp_path), tmp_path / "out"
    assert main(["convert", path, str(out), "--to", "exl3-v1", "--layers", "3", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"would write {out}: exl3 to exl3-v1, ")
    assert lines[1] == "  layers   1 of 2"
    assert lines[2] == f"  code     {8 * 12288:,} bytes"
    assert lines[-1].endswith("s at 300 MB/s")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("target", ["exl3", "exl3-v1", "native"])
def test_a_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    path, out = made(tmp_path), tmp_path / "out"
    assert main(["convert", path, str(out), "--to", target]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"wrote {out}: exl3 to {target}, ")
    assert captured.err == ""
    assert main(["validate", str(out), "--data"]) == 0
    assert capsys.readouterr().out.startswith((f"{target}: ", "note"))


def test_json_is_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = made(tmp_path), str(tmp_path / "out")
    assert main(["convert", path, out, "--to", "native", "--layers", "0", "--json"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert captured.err == ""
    assert (value["schema"], value["schema_version"]) == ("trellis-format/convert", 1)
    assert (value["source"], value["target"], value["dry_run"]) == ("exl3", "native", False)
    assert (value["layers"], value["left_out"]) == ([0], [3])
    parts = ("code_bytes", "scale_bytes", "outside_bytes", "file_bytes")
    assert value["bytes"] == sum(value[part] for part in parts)


def test_what_a_target_cannot_hold_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, codebook="mul1")
    for more in ([], ["--dry-run"]):
        assert main(["convert", path, str(tmp_path / "out"), "--to", "exl3-v1", *more]) == 1
        assert "layer 0: an exl3-v1 container cannot hold it: codebook mul1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--layers", "x"], "neither an index"),
        (["--layers", "7"], "layer 7 has no experts"),
        (["--shards", "0"], "0 shards"),
        (["--shards", "0", "--dry-run"], "0 shards"),
        (["--pattern", "("], "not a regular expression"),
    ],
)
def test_wrong_arguments_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    assert main(["convert", made(tmp_path), str(tmp_path / "out"), "--to", "exl3", *more]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_source_that_is_not_there_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "no"), str(tmp_path / "out"), "--to", "exl3"]) == 2
    assert "no such checkpoint directory" in capsys.readouterr().err


def test_the_container_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "gguf"])
