"""Holds rows of preparation to exact codes, their memory, and to files that are gone afterwards."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trellis_moe.bench import prepare as module
from trellis_moe.bench.prepare import GPU_PREPARATIONS, TINY_PREPARATIONS, Preparation, measure_layer_preparations
from trellis_moe.bench.record import Recorder
from trellis_moe.receipts.figures import KIMI_LAYERS, LAYER_1GB
from trellis_moe.receipts.schema import PrepareCase

CPU = torch.device("cpu")


def measured(preparation: Preparation) -> Recorder:
    recorder = Recorder(CPU, seconds=60.0, samples=5, tell=lambda line: None)
    measure_layer_preparations(recorder, preparation)
    return recorder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_each_bound_and_the_model_have_a_row(folder: Path) -> None:
    (tiny,) = TINY_PREPARATIONS
    recorder = measured(tiny)
    cases = [row.case for row in recorder.rows if isinstance(row.case, PrepareCase)]
    assert [(case.layer, case.layers, case.bound_bytes) for case in cases] == [
        ("tiny layer", 1, 1 << 20), ("tiny model", 3, 1 << 20),
    ]  # fmt: skip
    assert all(case.code_bytes == 4 * 3 * 256 * 256 * 3 // 8 for case in cases)
    one, model = (row.memory for row in recorder.rows)
    assert one is not None
    assert model is not None
    assert model.planned_bytes == 3 * one.planned_bytes
    assert list(folder.iterdir()) == []


def test_a_share_has_the_bytes_of_its_slots(folder: Path) -> None:
    share = Preparation("a share", 256, 384, 3, "2", (1 << 20,), slots=(4, 8), sparse=True)
    (row,) = measured(share).rows
    assert isinstance(row.case, PrepareCase)
    assert row.case.code_bytes == 3 * 3 * 256 * 256 * 2 // 8


def test_codes_that_differ_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module.measure_preparation
    monkeypatch.setattr(
        module, "measure_preparation", lambda *args, **options: replace(honest(*args, **options), is_exact=False)
    )
    with pytest.raises(ValueError, match="above its bound"):
        measured(TINY_PREPARATIONS[0])
    assert list(folder.iterdir()) == []


def test_what_a_gpu_prepares_is_what_is_asked() -> None:
    whole, *shares = GPU_PREPARATIONS
    assert whole.name == LAYER_1GB
    assert 3 * whole.experts * whole.hidden * whole.intermediate * 4 // 8 > 10**9
    assert whole.layers is not None
    assert whole.layers[1] * 3 * whole.experts * whole.hidden * whole.intermediate * 4 // 8 > 40 * 10**9
    for share in shares:
        assert share.slots is not None
        assert 3 * share.experts * share.hidden * 32 * share.slots[1] * 2 // 8 == KIMI_LAYERS[share.name]
