"""Holds validation to finding what is wrong wherever it is, to reading no data unless asked, and to the data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, write_bytes, write_checkpoint, write_json
from trellis_format.errors import FormatNotFoundError, FormatValueError
from trellis_format.report import Severity
from trellis_format.validate import validate_checkpoint
from trellis_format.validate_report import FIXES, ValidateReport

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 200, "num_experts": 2, "hidden_act": "silu"}
DOWN = "model.layers.0.mlp.experts.1.down_proj"
GATE = "model.layers.0.mlp.experts.0.gate_proj"


def sound() -> dict[str, Any]:
    """A layer of 128 x 200 channels, stored in 128 x 256."""
    tensors = dict(random_layer(np.random.default_rng(0), codebook="mul1", bits=2.5))
    for name, tensor in tensors.items():
        if name.endswith("svh") and "down_proj" not in name:
            tensor[200:] = 0
    return tensors


def errors(report: ValidateReport) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity is Severity.ERROR]


def test_the_data_set_is_sound(checkpoint_path: Path) -> None:
    done: list[tuple[int, int]] = []
    report = validate_checkpoint(checkpoint_path, data=True, on_progress=lambda *pair: done.append(pair))
    assert [finding for finding in report.findings if finding.severity is not Severity.NOTE] == []
    assert not report.has_errors
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]
    assert report.checked.bytes_read >= done[-1][1]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_sound_checkpoint(tmp_path: Path, shards: int) -> None:
    path = write_checkpoint(tmp_path, sound(), config=CONFIG, shards=shards, index=shards > 1)
    report = validate_checkpoint(path)
    assert errors(report) == []
    assert report.checked.model_dump() == {"shards": shards, "tensors": 24, "layers": 1, "data": False, "bytes_read": 0}
    assert errors(validate_checkpoint(path, data=True)) == []


def test_headers_are_checked_without_data_and_data_where_asked(tmp_path: Path) -> None:
    tensors = sound()
    tensors[f"{GATE}.svh"][255] = 1.0
    tensors[f"{DOWN}.suh"][3] = np.nan
    tensors[f"{DOWN}.mul1"] = np.array(1, np.int32)
    path = write_checkpoint(tmp_path, tensors, config=CONFIG)
    assert errors(validate_checkpoint(path)) == []
    report = validate_checkpoint(path, data=True)
    assert sorted(errors(report)) == ["marker-value", "padding-not-zero", "scale-not-finite"]
    assert report.has_errors
    assert all(finding.fix == FIXES[finding.code] for finding in report.findings)


def test_data_of_sound_linears_is_checked_beside_broken_ones(tmp_path: Path) -> None:
    tensors = sound()
    del tensors[f"{GATE}.suh"]
    tensors[f"{DOWN}.svh"][0] = np.inf
    report = validate_checkpoint(write_checkpoint(tmp_path, tensors, config=CONFIG), data=True)
    assert errors(report) == ["broken-linear", "scale-not-finite"]


def test_every_broken_file_is_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sound(), config=CONFIG, shards=4, index=True)
    shards = sorted(path.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    write_bytes(shards[2], b"[]")
    (path / "config.json").write_text("{")
    report = validate_checkpoint(path, data=True)
    assert [(finding.code, Path(str(finding.file)).name) for finding in report.findings] == [
        ("broken-shard", shards[0].name),
        ("broken-shard", shards[2].name),
        ("json-invalid", "config.json"),
    ]
    assert report.checked.shards == 0
    size = shards[0].stat().st_size
    assert report.findings[0].numbers == {"observed": size, "expected": size + 1}


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sound(), config=CONFIG)
    (path / "other.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    report = validate_checkpoint(path)
    assert errors(report) == ["broken-checkpoint"]
    assert "duplicate tensor" in report.findings[0].message


def test_an_index_that_lacks_a_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sound(), config=CONFIG, shards=2, index=True)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"][f"{GATE}.suh"]
    write_json(path / "model.safetensors.index.json", index)
    report = validate_checkpoint(path, data=True)
    assert errors(report) == ["index-mismatch"]
    assert report.findings[0].numbers == {"listed_only": 0, "stored_only": 1}
    assert errors(validate_checkpoint(path, ignore_index=True)) == []


def test_names_of_the_rank_sliced_dialect_do_not_end_it(tmp_path: Path) -> None:
    tensors = sound()
    sliced = {name.replace("gate_proj", "gate_proj.rank0"): tensor for name, tensor in tensors.items()}
    report = validate_checkpoint(write_checkpoint(tmp_path, sliced, config=CONFIG), data=True)
    assert "rank-sliced" in errors(report)


def test_a_layer_whose_sizes_are_wrong_has_no_known_padding(tmp_path: Path) -> None:
    tensors = sound()
    for suffix in ("trellis", "suh", "svh", "mul1"):
        del tensors[f"{GATE}.{suffix}"]
    tensors[f"{GATE.replace('gate', 'up')}.svh"][255] = 1.0
    assert errors(validate_checkpoint(write_checkpoint(tmp_path, tensors, config=CONFIG), data=True)) == [
        "broken-layer"
    ]


def test_a_configuration_of_the_wrong_type_does_not_end_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sound(), config=CONFIG | {"num_experts": "two"})
    assert errors(validate_checkpoint(path, data=True)) == ["config-invalid"]


def test_paths_without_a_checkpoint_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match="no such checkpoint directory"):
        validate_checkpoint(tmp_path / "no")
    with pytest.raises(FormatValueError, match=r"no \*\.safetensors file in the checkpoint directory"):
        validate_checkpoint(tmp_path)
    with pytest.raises(FormatValueError, match="lacks the groups"):
        validate_checkpoint(tmp_path, pattern="x")
