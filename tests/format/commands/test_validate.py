"""Holds `trellis-format validate` to what it prints and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import expert_name, random_layer, write_checkpoint
from trellis_format.cli import main

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}
SUH = f"{expert_name(0, 1, 'up_proj')}.suh"


def made(folder: Path, config: object = CONFIG, **changes: Any) -> str:
    tensors = dict(random_layer(np.random.default_rng(0))) | changes
    return str(write_checkpoint(folder, tensors, config=config))


def broken() -> dict[str, Any]:
    return {SUH: np.full(128, np.nan, np.float16)}


def test_a_sound_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path)
    assert main(["validate", path]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "exl3: 1 shards, 24 tensors, 1 layers, headers alone",
        "0 errors, 0 warnings, 1 note",
    ]
    assert main(["validate", path, "--data"]) == 0
    read = 6 * (2 * 128 + 2 * 256 + 2 * 4)  # suh, svh and, twice, the marker of six linears
    assert f"{read:,} bytes of data read" in capsys.readouterr().out


def test_a_finding_has_place_message_and_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, **broken())
    assert main(["validate", path]) == 0
    capsys.readouterr()
    assert main(["validate", path, "--data"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"error  scale-not-finite  {path}/model.safetensors {SUH}"
    assert lines[1].startswith("    all values must be finite in float16; 128 of 128 are not")
    assert lines[2].startswith("    fix: convert the model again")
    assert lines[-1].startswith("1 error, ")


def test_json_is_alone_and_carries_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, **broken())
    assert main(["validate", path, "--data", "--json"]) == 1
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert captured.err == ""
    assert value["schema"] == "trellis-format/validate"
    assert value["findings"][0]["numbers"] == {"index": 0, "count": 128, "length": 128}


def test_a_warning_alone_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", made(tmp_path, config=CONFIG | {"hidden_size": 999})]) == 0
    out = capsys.readouterr().out
    assert "warning  hidden-size" in out
    assert "1 warning, " in out


def test_names_that_a_terminal_might_obey_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, **{"x\x1b[2J.suh": np.ones(3, np.float16)})
    assert main(["validate", path]) == 0
    out = capsys.readouterr().out
    assert "orphan-tensor" in out
    assert "\x1b" not in out


def test_no_checkpoint_is_a_complaint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tmp_path)]) == 2
    assert main(["validate", str(tmp_path / "no"), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("trellis-format: ") == 2


def test_the_schema_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "validate"]) == 0
    assert "checked" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["schema"]) == 0
    assert "bits_per_weight" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize("command", ["validate", "inspect"])
def test_a_stated_method_can_be_ignored(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, CONFIG | {"quantization_config": {"quant_method": "gptq"}})
    assert main([command, path]) == 1
    assert "method-conflict" in capsys.readouterr().out
    assert main([command, path, "--ignore-method"]) == 0
    assert "method-ignored" in capsys.readouterr().out
