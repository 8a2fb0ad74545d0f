"""Holds `trellis-moe doctor` to what is wrong, to its exit codes, and to telling nothing of the user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trellis_kernels.cute import cache
from trellis_kernels.selfcheck import Check
from trellis_moe.cli import main
from trellis_moe.commands import doctor as module
from trellis_moe.commands.doctor import Finding, doctor

CPU = torch.device("cpu")
GOOD = [Check("decode", "mcg K=3", "cpu", "ok"), Check("decode", "mcg K=4", "cute", "skipped: no GPU")]


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """Outcomes of the self-check, which has tests of its own."""
    outcomes = list(GOOD)
    monkeypatch.setattr("trellis_kernels.selfcheck.run_checks", lambda device: iter(outcomes))
    return outcomes


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of kernels in a folder with a telling name."""
    folder = tmp_path / "somebody"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("trellis_kernels.environment.cache_folder", lambda: folder)
    monkeypatch.setattr(cache, "cache_folder", lambda: folder)
    cache.default_cache.cache_clear()
    yield folder
    cache.default_cache.cache_clear()


def state(findings: list[Finding], what: str) -> tuple[str, str]:
    found = [finding for finding in findings if finding.what == what]
    return found[-1].state, found[-1].text


def test_a_machine_without_a_gpu_is_sound(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["schema_version"], report["ok"]) == ("trellis-moe/doctor", 1, True)
    findings = [Finding(**finding) for finding in report["findings"]]
    assert [finding.what for finding in findings][:2] == ["trellis", "torch"]
    assert state(findings, "device")[0] == "note"
    assert state(findings, "kernel cache") == ("ok", "0 kernels, 0 of 1,073,741,824 bytes")
    assert state(findings, "self-check") == ("ok", "2 comparisons of ops with numpy, 1 skipped, all good")


def test_the_block_to_paste_tells_nothing_of_the_user(
    kept: Path, checks: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    checks.append(Check("decode", "mcg K=5", "cute", f"failed: OSError: {kept}/kernel.o: no such file"))
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    block = shown.split("```text\n")[1].split("```")[0]
    assert "bad  self-check: decode mcg K=5 on cute: failed: OSError: PATH no such file" in block
    assert "3 comparisons of ops with numpy, 1 skipped, 1 failed" in block
    assert "somebody" not in shown
    assert str(Path.home()) not in shown


def test_the_self_check_can_be_left_out(kept: Path) -> None:
    assert [finding for finding in doctor(CPU, checks=False) if finding.what == "self-check"] == []


@pytest.mark.parametrize(
    ("found", "failure", "on_cpu", "on_gpu"),
    [
        (None, None, "note", "bad"),
        ("4.8.1", "ImportError", "bad", "bad"),
        ("4.8.1", None, "ok", "ok"),
    ],
)
def test_a_compiler_is_needed_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, found: str | None, failure: str | None, on_cpu: str, on_gpu: str
) -> None:
    monkeypatch.setattr("trellis_kernels.selfcheck.compiler_state", lambda: (found, failure))
    assert [module._compiler(torch.device(kind)).state for kind in ("cpu", "cuda")] == [on_cpu, on_gpu]


def test_a_cache_that_others_may_write_is_bad(kept: Path) -> None:
    kept.chmod(0o777)
    found = module._cache()
    assert found.state == "bad"
    assert "somebody" not in found.text


def test_a_cache_that_is_off_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trellis_kernels.environment.cache_folder", lambda: None)
    assert module._cache().state == "note"


def test_a_gpu_that_is_asked_for_must_be_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_is_named_with_its_compile_target() -> None:
    found = module._device(torch.device("cuda"))
    assert torch.cuda.get_device_name() in found.text
    assert "compile target sm_" in found.text
