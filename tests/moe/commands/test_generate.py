"""Holds the generate command to its output: text on stdout, a summary on stderr, one JSON object where asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_set import DataSet
from trellis_moe.cli import main
from trellis_moe.commands.generate import printable_text

pytest.importorskip("transformers", reason="transformers is an extra of trellis-moe")


@pytest.fixture
def model(data_set: DataSet) -> str:
    return str(data_set.root / "checkpoints" / "tiny_3_mul1")


def test_text_goes_out_and_the_summary_aside(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", model, "--device", "cpu", "--max-new-tokens", "3"]
    assert main([*words, "--prompt", "Hello", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert main([*words, "--prompt", "Hello"]) == 0
    out, err = capfd.readouterr()
    assert out == f"Hello{printable_text(report['text'])}\n"
    first, second = err.strip().splitlines()
    assert first.startswith("qwen3_moe on cpu in float16: 2 layers of experts and 9 other linears, loaded in ")
    assert second.startswith(f"{len(report['prompt_ids'])} tokens in, 3 out: the first after ")
    assert second.endswith(" tokens/s")


def test_ids_and_one_token(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", model, "--device", "cpu", "--max-new-tokens", "1", "--ids", "3, 4,5"]) == 0
    _, err = capfd.readouterr()
    assert "3 tokens in, 1 out: the first after" in err
    assert "tokens/s" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ids", "1,x"], "--ids takes integers separated by commas, got '1,x'"),
        ([], "neither of --prompt and --ids; give one"),
        (["--ids", "1", "--max-new-tokens", "0"], "--max-new-tokens must be positive, got 0"),
    ],
)
def test_what_is_refused_is_one_line(
    model: str, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, *words]) == 2
    out, err = capfd.readouterr()
    assert (out, err.splitlines()[-1]) == ("", f"trellis-moe: error: {message}")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(tmp_path / "gone"), "--ids", "1", "--device", "cpu"]) == 2
    assert "gone" in capfd.readouterr().err


def test_nothing_goes_out_before_everything_is_found_sound(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", model, "--device", "cpu", "--prompt", "Hello", "--max-new-tokens", "600"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--max-new-tokens 600 after a prompt of" in err.splitlines()[-1]


def test_warnings_are_lines_of_their_own(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shallow = tmp_path / "shallow"
    shutil.copytree(model, shallow)
    config = json.loads((shallow / "config.json").read_text()) | {"num_hidden_layers": 1}
    (shallow / "config.json").write_text(json.dumps(config))
    words = ["generate", "--model", str(shallow), "--device", "cpu", "--ids", "3", "--max-new-tokens", "1", "--json"]
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert [line for line in err.splitlines() if line.startswith("trellis-moe: warning: ")] == [
        f"trellis-moe: warning: {warning}" for warning in json.loads(out)["warnings"]
    ]
    assert json.loads(out)["warnings"]


def test_text_cannot_drive_a_terminal() -> None:
    assert printable_text("a\n\tb\x1b[2J\x07") == "a\n\tb\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"
