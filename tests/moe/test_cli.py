"""Holds the command line to its exit codes, one line for each refusal, and output that a terminal can be shown."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trellis_moe
from data_set import DEFAULT_DATA
from interrupts import interrupted_start
from trellis_format.errors import FormatValueError
from trellis_kernels import KernelValueError
from trellis_moe import MoeValueError
from trellis_moe.cli import main
from trellis_moe.commands import demo as demo_module
from trellis_moe.commands import run as run_module
from trellis_moe.commands.run import RunRequest
from trellis_prep import PrepValueError

REPORT: dict[str, Any] = {
    "geometry": {"num_experts": 3, "hidden_size": 200, "intermediate_size": 384, "padded_hidden_size": 256,
                 "padded_intermediate_size": 384},
    "layer": 4, "checkpoint": "some/model", "top_k": 2, "channels": [0, 128], "codebook": "mcg", "rates": [1.0, 2.5],
    "activation": "silu", "io_dtype": "float16", "tokens": 7, "prepared_bytes": 12345, "code_bytes": 12000,
    "scratch_bytes": 999, "device": "cpu", "path": {"decode": "cpu"}, "seconds": {"run": 0.25},
    "non_finite_tokens": 0, "output": "y.safetensors", "ok": True,
    "activation_constants": {"limit": None, "alpha": 1.0, "beta": 0.0},
}  # fmt: skip
RUN = ["run", "--checkpoint", "model", "--layer", "4", "--input", "in", "--output", "y"]


def stub(
    monkeypatch: pytest.MonkeyPatch, result: dict[str, Any] | BaseException, warnings: tuple[str, ...] = ()
) -> list[tuple[Any, dict[str, Any]]]:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def command(*args: Any, warn: Callable[[str], None], **kwargs: Any) -> dict[str, Any]:
        calls.append((args, kwargs))
        for text in warnings:
            warn(text)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(run_module, "run", command)
    monkeypatch.setattr(demo_module, "demo", command)
    return calls


def test_arguments_of_run_reach_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stub(monkeypatch, REPORT)
    more = ["--tp-rank", "1", "--tp-size", "3", "--device", "cpu", "--activation", "situ", "--pattern", "p"]
    assert main([*RUN, *more, "--ignore-index"]) == 0
    assert main([*RUN, "--json"]) == 0
    files = {"checkpoint": Path("model"), "layer": 4, "input": Path("in"), "output": Path("y")}
    full = RunRequest(**files, device="cpu", rank=1, world_size=3, activation="situ", pattern="p", ignore_index=True)
    assert calls == [((full,), {"show_progress": True}), ((RunRequest(**files),), {"show_progress": False})]


def test_arguments_of_demo_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stub(monkeypatch, REPORT)
    assert main(["demo"]) == 0
    assert main(["demo", "--checkpoint", "c", "--layer", "2", "--tokens", "9", "--device", "cpu", "--json"]) == 0
    assert main(["demo", "--activation", "situ"]) == 0
    plain = {"checkpoint": None, "layer": 0, "device": None, "tokens": 40, "activation": None, "show_progress": True}
    other = plain | {"checkpoint": Path("c"), "layer": 2, "device": "cpu", "tokens": 9, "show_progress": False}
    assert [kwargs for _, kwargs in calls] == [plain, other, plain | {"activation": "situ"}]


def test_a_demo_outside_its_bounds_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {"error_float64": 2e-3, "bound_float64": 1e-3, "error_exllamav3": 1e-3, "bound_exllamav3": 2e-3}
    stub(monkeypatch, REPORT | errors | {"ok": False, "routes_agree": False})
    assert main(["demo"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "2.00e-03 relative L2, OUTSIDE 1e-03" in text
    assert "1.00e-03 relative L2, within 2e-03" in text
    assert "DIFFER" in text


@pytest.mark.parametrize("kind", [FormatValueError, PrepValueError, KernelValueError, MoeValueError])
def test_a_refusal_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    stub(monkeypatch, kind("x: 3 channels,\nthe layer takes \x1b[31m4\x07"))
    assert main(RUN) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "trellis-moe: error: x: 3 channels,\\nthe layer takes \\x1b[31m4\\x07\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["walk"], "'walk'"),
        (["run"], "--checkpoint, --layer, --input, --output"),
        ([*RUN, "--layer", "two"], "'two'"),
        ([*RUN, "--activation", "tanhexp"], "'tanhexp'"),
        ([*RUN, "--device", "tpu"], "'tpu'"),
        ([*RUN, "--tp-size", "2.5"], "'2.5'"),
        (["demo", "--tokens", "many"], "'many'"),
    ],
)
def test_arguments_that_cannot_be_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert "--help" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RUN, "--tp-rank", "0"], "--tp-rank is given alone"),
        ([*RUN, "--tp-size", "2"], "--tp-size is given alone"),
        (["demo", "--tokens", "0"], "--tokens must be positive, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


def test_help_names_each_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in ("checkpoint", "layer", "input", "output", "tp-rank", "json", "device"))


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, KeyboardInterrupt())
    assert main(RUN) == 130
    assert capsys.readouterr().err == "trellis-moe: interrupted\n"


def test_json_is_alone_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, REPORT)
    assert main([*RUN, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == REPORT
    assert err == ""


def test_the_table_says_what_ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, REPORT | {"non_finite_tokens": 2, "checkpoint": "a\x1b[2Jb[bold]"})
    assert main(RUN) == 0
    out = capsys.readouterr().out
    for words in ("3, top 2", "200 (stored 256)", "0..128 of 384", "mcg, 1, 2.5", "12,345 bytes", "2 of 7 tokens",
                  "y.safetensors", "decode: cpu", "run 0.250"):  # fmt: skip
        assert words in out, words
    assert "\x1b" not in out
    assert "a\\x1b[2Jb[bold]" in out


def test_the_table_has_the_constants_of_a_law_that_has_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constants = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
    stub(monkeypatch, REPORT | {"activation": "swigluoai", "activation_constants": constants})
    assert main(RUN) == 0
    assert "swigluoai (limit 7, alpha 1.702, beta 1), float16 in" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [RUN, ["demo"]])
def test_a_warning_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    stub(monkeypatch, REPORT, warnings=("a/config.json: says\n\x1b[31m5", "and 6"))
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == REPORT
    assert err == "trellis-moe: warning: a/config.json: says\\n\\x1b[31m5\ntrellis-moe: warning: and 6\n"


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("installed", [True, False])
def test_the_version_is_that_of_the_project(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    clone = DEFAULT_DATA.parents[1] / "packages/trellis-moe"
    project = tomllib.loads((clone / "pyproject.toml").read_text())["project"]
    known = installed or Path(trellis_moe.__file__).is_relative_to(clone)  # a wheel without its metadata knows nothing
    assert capsys.readouterr().out == f"{project['name']} {project['version'] if known else 'unknown'}\n"


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_interrupt_while_a_library_loads_is_one_line(library: str) -> None:
    done = interrupted_start("trellis_moe.cli", ["demo", "--device", "cpu"], library)
    assert done == (130, "", "trellis-moe: interrupted\n")


def test_arguments_are_refused_without_torch() -> None:
    words = [*RUN, "--tp-rank", "0"]
    program = f"import sys; from trellis_moe.cli import main; print(main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "2 False\n"
    assert done.stderr == "trellis-moe: error: --tp-rank is given alone; --tp-rank and --tp-size go together\n"


class _Gone:
    """A stdout whose reader went away, or whose disk is full."""

    def __init__(self, error: OSError) -> None:
        self._error = error
        self.encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise self._error

    def fileno(self) -> int:
        raise OSError("no descriptor")


def test_a_stdout_that_went_away_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, REPORT)
    for error, words in (
        (BrokenPipeError(), ""),
        (OSError(28, "No space left on device"), "trellis-moe: error: standard output: No space left on device\n"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", _Gone(error))
            assert main([*RUN, "--json"]) == 1
        assert capsys.readouterr().err == words


def test_a_system_error_names_its_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, OSError(36, "File name too long", "a" * 9))
    assert main(RUN) == 2
    assert capsys.readouterr().err == f"trellis-moe: error: {'a' * 9}: File name too long\n"


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, RuntimeError("[enforce fail]\nDefaultCPUAllocator: can't allocate memory: 9 bytes"))
    assert main(RUN) == 2
    told = "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"
    assert capsys.readouterr().err == f"trellis-moe: error: out of memory: {told}\n"
    stub(monkeypatch, RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        main(RUN)


def test_a_closed_stdout_or_stderr_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, REPORT)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(RUN) == 0
    stub(monkeypatch, MoeValueError("refused"))
    monkeypatch.setattr(sys, "stderr", None)
    assert main(RUN) == 2


def test_the_demo_runs_as_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(DEFAULT_DATA)
    assert main(["demo", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
