"""Holds the demo to its two references, to other checkpoints, and to a refusal outside a clone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_set import DEFAULT_DATA, DataSet
from trellis_moe import MoeUnsupportedError, MoeValueError
from trellis_moe.commands import demo as module
from trellis_moe.commands.demo import DEMO_CHECKPOINT, demo


def test_the_checkpoint_of_the_repository_is_near_both_references(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(DEFAULT_DATA)  # found from any folder of a clone
    report = demo(checkpoint=None, layer=0, device="cpu", tokens=3, show_progress=False)
    assert report["ok"] is True
    assert report["routes_agree"] is True
    assert 0 < report["error_float64"] <= report["bound_float64"] == 1e-3
    assert 0 < report["error_exllamav3"] <= report["bound_exllamav3"] == 2e-3
    assert (report["schema"], report["tokens"], report["top_k"]) == ("trellis-moe/demo", 8, 2)
    assert json.loads(json.dumps(report)) == report
    assert "8 experts" in report["explain"]


@pytest.mark.parametrize("layer", [0, 1])
def test_another_checkpoint_takes_random_tokens(data_set: DataSet, layer: int) -> None:
    path = data_set.checkpoints["tiny_3_mul1"]
    report = demo(checkpoint=path, layer=layer, device="cpu", tokens=5, show_progress=False)
    assert (report["ok"], report["tokens"], report["checkpoint"]) == (True, 5, str(path))
    assert 0 < report["error_float64"] <= 1e-3
    assert "error_exllamav3" not in report


def test_an_activation_can_be_given_and_meets_no_output_of_another() -> None:
    report = demo(checkpoint=None, layer=0, device="cpu", tokens=3, activation="situ", show_progress=False)
    assert (report["activation"], report["ok"], report["tokens"]) == ("situ", True, 3)
    assert "error_exllamav3" not in report


def test_other_routers_are_refused(data_set: DataSet) -> None:
    with pytest.raises(MoeUnsupportedError, match=r"gpt_oss.*trellis-moe run"):
        demo(checkpoint=data_set.checkpoints["gptoss_3_mcg"], layer=0, device="cpu", tokens=5, show_progress=False)


def test_an_error_beyond_the_bound_is_not_ok(monkeypatch: pytest.MonkeyPatch, data_set: DataSet) -> None:
    monkeypatch.setattr(module, "_BOUND_REFERENCE", 1e-9)
    path = data_set.checkpoints["tiny_3_mul1"]
    assert demo(checkpoint=path, layer=0, device="cpu", tokens=5, show_progress=False)["ok"] is False


def test_a_package_without_its_clone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "trellis_moe" / "commands" / "demo.py"))
    monkeypatch.setattr(module, "DEMO_CHECKPOINT", "absent")  # the folder for temporary files may lie in a clone
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MoeValueError, match="give --checkpoint DIR"):
        demo(checkpoint=None, layer=0, device="cpu", tokens=5, show_progress=False)


def test_a_clone_without_stored_outputs_takes_random_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "tests" / "data" / "checkpoints" / DEMO_CHECKPOINT
    shutil.copytree(DEFAULT_DATA / "checkpoints" / DEMO_CHECKPOINT, data)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "src" / "demo.py"))
    report = demo(checkpoint=None, layer=0, device="cpu", tokens=6, show_progress=False)
    assert (report["ok"], report["tokens"], report["checkpoint"]) == (True, 6, str(data))
    assert "error_exllamav3" not in report
