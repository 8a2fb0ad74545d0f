"""Holds the validation of containers to finding what is wrong in manifest, headers and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from exl3_files import random_layer, write_checkpoint, write_json, write_shard
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.report import Severity
from trellis_format.validate import validate_checkpoint
from trellis_format.validate_report import ValidateReport

CONTAINERS = ("exl3-v1", "native")
MANIFESTS = {"exl3-v1": "exl3-manifest.json", "native": "trellis-manifest.json"}
CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


def made(folder: Path, container: str, *, width: int = 256, bias: Any = None) -> Path:
    tensors = random_layer(np.random.default_rng(0), bias=bias) | random_layer(np.random.default_rng(1), layer=2)
    if bias is not None:
        tensors = random_layer(np.random.default_rng(0), bias=bias)
    for name, tensor in tensors.items():
        if name.endswith(("svh", "bias")) and "down_proj" not in name:
            tensor[width:] = 0  # type: ignore[index]
    tensors["norm.weight"] = np.ones(128, np.float16)
    source = write_checkpoint(folder / "source", tensors, config=CONFIG | {"moe_intermediate_size": width})
    with closing(open_source(source)) as opened:
        convert(opened, folder / container, container)
    return folder / container


def errors(report: ValidateReport) -> list[tuple[str, str]]:
    """Code and file of each error."""
    return [(it.code, Path(str(it.file)).name) for it in report.findings if it.severity is Severity.ERROR]


def first_file(path: Path) -> Path:
    return sorted(path.glob("*layer*.safetensors"))[0]


def rewrite(path: Path, container: str, change: Callable[[dict[str, Any]], object]) -> str:
    """Change the tensors of the first layer file and put its digest right; returns the file's name."""
    file = first_file(path)
    tensors = load_file(file)
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    change(tensors)
    save_file(tensors, file, metadata)
    manifest = json.loads((path / MANIFESTS[container]).read_text())
    manifest["layers"]["0"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_json(path / MANIFESTS[container], manifest)
    return file.name


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_sound_container(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    report = validate_checkpoint(path)
    assert report.findings == ()
    assert report.container == container
    assert (report.checked.shards, report.checked.layers, report.checked.bytes_read) == (3, 2, 0)
    done: list[tuple[int, int]] = []
    report = validate_checkpoint(path, data=True, on_progress=lambda *pair: done.append(pair))
    assert report.findings == ()
    sizes = [file.stat().st_size for file in sorted(path.glob("*layer*.safetensors"))]
    assert done == [(sizes[0], sum(sizes)), (sum(sizes), sum(sizes))]
    assert report.checked.bytes_read == sum(sizes)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_flipped_bit_is_found_by_the_digest_alone(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    file = first_file(path)
    data = bytearray(file.read_bytes())
    data[-8192] ^= 1
    file.write_bytes(data)
    assert validate_checkpoint(path).findings == ()
    assert errors(validate_checkpoint(path, data=True)) == [("payload-hash", file.name)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_manifest_and_headers(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    first, second = sorted(path.glob("*layer*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    (path / "outside-00001-of-00001.safetensors").write_bytes(b"short")
    tensors = load_file(second)
    save_file(tensors, second)  # without metadata
    report = validate_checkpoint(path, data=True)
    assert errors(report) == [
        ("container-invalid", first.name),
        ("container-invalid", second.name),
        ("broken-shard", "outside-00001-of-00001.safetensors"),
    ]
    write_shard(second, tensors | {"more": np.ones(1, np.uint8)})
    assert "unexpected: ['more']" in validate_checkpoint(path).findings[1].message
    second.unlink()
    assert "no such file" in validate_checkpoint(path).findings[1].message
    (path / MANIFESTS[container]).write_text("{}")
    report = validate_checkpoint(path)
    assert errors(report) == [("container-invalid", MANIFESTS[container])]
    assert report.has_errors


@pytest.mark.parametrize("container", CONTAINERS)
def test_scales_that_are_not_finite(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    name = {"exl3-v1": "rotations", "native": "intermediate_scales.vectors"}[container]
    file = rewrite(path, container, lambda tensors: tensors[name].reshape(-1).__setitem__(77, np.nan))

    report = validate_checkpoint(path, data=True)
    assert errors(report) == [("container-invalid", file)]
    assert "finite" in report.findings[0].message


@pytest.mark.parametrize(
    ("name", "index", "shown"),
    [
        ("intermediate_scales.vectors", (1, 0, 201), "intermediate_scales"),
        ("bias.up", (0, 255), "bias.up"),
    ],
)
def test_padding_of_native_layers_must_be_zero(tmp_path: Path, name: str, index: tuple[int, ...], shown: str) -> None:
    path = made(tmp_path, "native", width=200, bias=np.float16)
    assert validate_checkpoint(path, data=True).findings == ()
    rewrite(path, "native", lambda tensors: tensors[name].__setitem__(index, 0.5))
    (finding,) = validate_checkpoint(path, data=True).findings
    assert (finding.code, finding.tensor) == ("padding-not-zero", shown)
    assert finding.numbers == {"index": index[-1], "count": 1, "true": 200, "stored": 256}


def test_a_layer_that_no_adapter_takes_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trellis_format import validate_container
    from trellis_format.errors import FormatUnsupportedError

    def refuse(_: object) -> object:
        raise FormatUnsupportedError("pair rates")

    path = made(tmp_path, "exl3-v1")
    monkeypatch.setattr(validate_container, "trellis_from_container", refuse)
    report = validate_checkpoint(path, data=True)
    assert [(it.code, it.severity) for it in report.findings] == [("not-described", Severity.NOTE)] * 2
