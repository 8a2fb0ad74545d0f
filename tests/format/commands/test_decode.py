"""Holds `trellis-format decode` to its arguments, what it prints and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from exl3_files import expert_name, random_layer, write_checkpoint
from trellis_format.cli import main
from trellis_format.codebooks import get_codebook
from trellis_format.rates import Rate
from trellis_format.tiles import decode_inner

GATE = expert_name(0, 1, "gate_proj")


def made(folder: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    tensors = dict(random_layer(np.random.default_rng(0), **options))
    return write_checkpoint(folder / "in", tensors, shards=2, index=True), tensors


@pytest.mark.parametrize("suffix", ["", ".trellis"])
def test_one_linear(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    path, tensors = made(tmp_path)
    out = tmp_path / "out.safetensors"
    assert main(["decode", str(path), GATE + suffix, str(out), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"wrote {out}: {GATE}.inner 128 x 256 float32\n"
    with safe_open(out, "np") as opened:
        assert opened.metadata() == {
            "layout": "[in, out]",
            "basis": "rotated",
            "codebook": "mcg",
            "bits_per_weight": "3",
        }
        found = opened.get_tensor(f"{GATE}.inner")
    assert np.array_equal(found, decode_inner(tensors[f"{GATE}.trellis"], get_codebook("mcg"), Rate.of(3)))


def test_the_original_basis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = made(tmp_path)
    assert main(["decode", str(path), GATE, str(tmp_path / "out"), "--original-basis"]) == 0
    assert f"{GATE}.weight 128 x 256 float16" in capsys.readouterr().out
    with safe_open(tmp_path / "out", "np") as opened:
        assert opened.metadata()["basis"] == "original"


def test_names_that_are_not_there_get_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = made(tmp_path)
    assert main(["decode", str(path), GATE.replace("gate_", "gate"), str(tmp_path / "out")]) == 2
    assert f"no linear of this name; nearest: {GATE}" in capsys.readouterr().err
    assert main(["decode", str(path), "???", str(tmp_path / "out")]) == 2
    assert "no linear of this name; it has 6" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("container", ["exl3-v1", "native"])
def test_other_containers(tmp_path: Path, capsys: pytest.CaptureFixture[str], container: str) -> None:
    path, tensors = made(tmp_path)
    there = str(tmp_path / "there")
    assert main(["convert", str(path), there, "--to", container]) == 0
    assert main(["decode", there, GATE, str(tmp_path / "out")]) == 0
    capsys.readouterr()
    with safe_open(tmp_path / "out", "np") as opened:
        found = opened.get_tensor(f"{GATE}.inner")
    assert np.array_equal(found, decode_inner(tensors[f"{GATE}.trellis"], get_codebook("mcg"), Rate.of(3)))
    for wrong in (
        GATE.replace("experts.1", "experts.2"),
        GATE.replace("layers.0", "layers.1"),
        "gate_proj",
        GATE + "x",
    ):
        assert main(["decode", there, wrong, str(tmp_path / "no")]) == 2
        assert "no linear of this name" in capsys.readouterr().err


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = made(tmp_path)
    (tmp_path / "out").write_text("kept")
    assert main(["decode", str(path), GATE, str(tmp_path / "out")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "kept"


def test_a_foreign_multiplier_is_not_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = dict(random_layer(np.random.default_rng(0)))
    tensors[f"{GATE}.mcg"] = np.array(7, np.int32)
    path = write_checkpoint(tmp_path / "in", tensors)
    assert main(["decode", str(path), GATE, str(tmp_path / "out")]) == 1
    assert "0x00000007" in capsys.readouterr().err


def test_an_index_that_is_wrong_can_be_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = made(tmp_path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert main(["decode", str(path), GATE, str(tmp_path / "out")]) == 1
    assert "--ignore-index" in capsys.readouterr().err
    assert main(["decode", str(path), GATE, str(tmp_path / "out"), "--ignore-index"]) == 0
