"""Holds the timing of the few-token layer to the keys that it says it times, and its rows to what they claim."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trellis_kernels.bench import moe_small
from trellis_kernels.bench.moe_small import GEOMETRIES, main, make_key


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's numbers where there is no GPU."""
    monkeypatch.setattr(moe_small, "arch_of_device", lambda index: SimpleNamespace(name="sm_90a"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_keys_are_of_the_geometry(name: str) -> None:
    geometry = GEOMETRIES[name]
    key = make_key(geometry, 8, {})
    assert (key.hidden, key.width, key.max_experts, key.top_k, key.codebook) == (
        geometry.hidden,
        geometry.intermediate,
        256,
        geometry.top_k,
        geometry.codebook,
    )
    assert key.up_rates == key.down_rates == (int(float(geometry.rate) * 2),)


@pytest.mark.usefixtures("hopper")
def test_changes_reach_the_key_and_nothing_else() -> None:
    geometry = GEOMETRIES["glm"]
    planned = make_key(geometry, 8, {})
    key = make_key(geometry, 8, {"row_columns": 4, "up": {"split": 5}, "down": {"stages": 1, "in_shared": False}})
    assert key.row_columns == 4
    assert key.up.split == 5
    assert (key.up.slices, key.up.resident) == (planned.up.slices, planned.up.resident)
    assert key.down.stages == 1
    # the arithmetic also changes what is planned
    qwen = GEOMETRIES["qwen"]
    assert make_key(qwen, 8, {"arithmetic": "bytes"}).up != make_key(qwen, 1, {"arithmetic": "bytes"}).up
    assert make_key(geometry, 8, {"up": {"slices": 8, "resident": 1}}).up == replace(planned.up, slices=8, resident=1)


@pytest.mark.gpu
def test_a_row_has_its_times_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--geometry", "qwen", "--tokens", "1", "--changes", "{}", '{"row_columns": 3}'])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert 0 < rows[0]["us"] < 1000
    assert 0 < rows[0]["eager_us"] < 2000
    assert rows[0]["error"] < 1e-3
    assert "1, 2, 4" in rows[1]["failure"]
