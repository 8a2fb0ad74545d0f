"""Holds the command to its streams and exit codes, as a process where that is what matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, write_bytes, write_checkpoint
from trellis_format.cli import main
from trellis_format.report import InspectReport
from trellis_format.version import version

SOURCE = Path(__file__).resolve().parents[2] / "packages/trellis-format/src"
RNG = np.random.default_rng(0)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trellis_format", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sound", random_layer(RNG), config={"hidden_act": "silu"})


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    tensors = random_layer(RNG) | {"model.layers.0.mlp.experts.0.up_proj.suh": np.zeros(3, np.float16)}
    return write_checkpoint(tmp_path / "broken", tensors, config={"hidden_act": "silu"})


def test_exit_codes(sound: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sound)]) == 0
    assert "Layers with experts" in capsys.readouterr().out
    assert main(["inspect", str(broken)]) == 1
    assert "broken-linear" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"trellis-format: {tmp_path / 'none'}: no such checkpoint directory\n"
    (tmp_path / "empty").mkdir()
    assert main(["inspect", str(tmp_path / "empty")]) == 2


def commands(path: Path, out: Path) -> list[list[str]]:
    """Every command that reads a checkpoint, on one."""
    module = "model.layers.0.mlp.experts.0.up_proj"
    return [
        ["inspect", str(path)],
        ["validate", str(path)],
        ["convert", str(path), str(out), "--to", "native"],
        ["decode", str(path), module, str(out)],
    ]


def test_a_file_that_breaks_a_rule_is_1_of_every_command(tmp_path: Path, broken: Path) -> None:
    header = tmp_path / "header"
    header.mkdir()
    write_bytes(header / "model.safetensors", b"[]")
    unlisted = write_checkpoint(tmp_path / "unlisted", random_layer(RNG), config={"hidden_act": "silu"})
    (unlisted / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    text = write_checkpoint(tmp_path / "text", random_layer(RNG))
    (text / "config.json").write_text("{")
    for path in (broken, header, unlisted, text):
        for arguments in commands(path, tmp_path / "out"):
            assert main(arguments) == 1, arguments
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_opened_or_written_is_2_of_every_command(tmp_path: Path, sound: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty", sound / "model.safetensors"):
        for arguments in commands(path, tmp_path / "out"):
            assert main(arguments) == 2, arguments
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("kept")
    for arguments in commands(sound, tmp_path / "file")[2:] + commands(sound, tmp_path / "file/below")[2:]:
        assert main(arguments) == 2, arguments
    assert main(["synth", str(tmp_path / "file"), "--hidden", "128", "--intermediate", "128", "--experts", "1"]) == 2
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["inspect_checkpoint", "validate.validate_checkpoint"])
def test_an_interrupt_is_one_line(
    sound: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"trellis_format.cli.{name}", interrupt)
    assert main([name.partition("_")[0].partition(".")[0], str(sound)]) == 130
    assert capsys.readouterr() == ("", "trellis-format: interrupted\n")


@pytest.mark.parametrize(
    "arguments", [[], ["inspect"], ["inspect", "--jsn", "x"], ["look", "x"], ["inspect", "a", "b"]], ids=" ".join
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: trellis-format" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["(", "x", "(?P<layer>x)"])
def test_a_pattern_that_is_not_usable_is_2(sound: Path, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sound), "--pattern", pattern]) == 2
    assert "pattern" in capsys.readouterr().err


def test_json_is_all_of_stdout(sound: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, code in ((sound, 0), (broken, 1)):
        assert main(["inspect", str(path), "--json"]) == code
        out, err = capsys.readouterr()
        assert err == ""
        assert InspectReport.model_validate_json(out).path == str(path)
        assert out.endswith("}\n")


def test_a_pattern_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = random_layer(RNG, name=lambda layer, expert, word: f"net{layer}.e{expert}.{word}")
    path = write_checkpoint(tmp_path / "c", tensors, config={"hidden_act": "silu"})
    pattern = r"net(?P<layer>\d+)\.e(?P<expert>\d+)\.(?P<projection>\w+)"
    assert main(["inspect", str(path), "--json", "--pattern", pattern]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["experts"] == 2


def test_ignoring_the_index_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path / "c", random_layer(RNG), config={"hidden_act": "silu"})
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert main(["inspect", str(path)]) == 1
    assert "index-mismatch" in capsys.readouterr().out
    assert main(["inspect", str(path), "--ignore-index"]) == 0
    assert "index-ignored" in capsys.readouterr().out


def test_the_schema_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == InspectReport.json_schema()


def test_the_version_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"trellis-format {version()}\n"


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit codes: 0 nothing is wrong" in capsys.readouterr().out


def test_the_sources_run_without_being_installed(sound: Path) -> None:
    done = run("inspect", str(sound), "--json", cwd=SOURCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tool_version"] == version()
    assert run("--version", cwd=SOURCE).stdout == f"trellis-format {version()}\n"


def test_a_reader_that_stops_ends_the_command_quietly(broken: Path) -> None:
    command = [sys.executable, "-m", "trellis_format", "inspect", str(broken)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(sound: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "trellis_format", "inspect", str(sound)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "trellis-format: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_names_are_written_in_any_encoding_and_drive_no_terminal(tmp_path: Path, encoding: str) -> None:
    tensors = random_layer(RNG) | {"模型\x1b[31m.weight": np.zeros(2, np.float16)}
    path = write_checkpoint(tmp_path / "c", tensors, config={"hidden_act": "silu"})
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    for arguments in (["inspect", str(path)], ["inspect", str(path), "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "trellis_format", *arguments], capture_output=True, env=environment, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\x1b" not in done.stdout
        assert b"[31m.weight" in done.stdout


def test_complaints_drive_no_terminal(tmp_path: Path) -> None:
    header = {"\x1b[31mred": {"dtype": "\x1b]0;x\x07", "shape": [], "data_offsets": [0, 0]}}
    (tmp_path / "c").mkdir()
    write_bytes(tmp_path / "c/model.safetensors", header)
    done = run("inspect", str(tmp_path / "c"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "\x1b" not in done.stderr
    assert r"\x1b[31mred" in done.stderr


def test_real_checkpoints_are_sound(checkpoint_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint_path)]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
