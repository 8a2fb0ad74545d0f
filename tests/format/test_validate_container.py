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
from slot_files import random_content, random_pair_content
from trellis_format.container.writer import write_content, write_manifest
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


def test_a_layer_that_no_adapter_takes_is_a_note(tmp_path: Path) -> None:
    content = random_pair_content()
    write_manifest(tmp_path, content.head, {3: write_content(tmp_path, content)})
    assert validate_checkpoint(tmp_path).findings == ()
    (finding,) = validate_checkpoint(tmp_path, data=True).findings
    assert (finding.code, finding.severity) == ("not-described", Severity.NOTE)
    assert "pair rates of kinds P33, P24, P43" in finding.message


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("rates_fc1", (0, 0), 0x44, "rates_fc1 of pair 0, expert 0 is 0x44; the manifest declares P24, P33, P43"),
        ("up_suh", (1, 5), np.inf, "up_suh must be finite, got inf"),
        ("codes", (15, -1), 1, "padding of codes must be zero, slot 15 has 0x01"),
    ],
)
def test_numbers_of_pair_rates_are_held_to_their_rules(
    tmp_path: Path, name: str, place: tuple[int, int], value: float, words: str
) -> None:
    content = random_pair_content()
    entry = write_content(tmp_path, content)
    file = tmp_path / entry.file
    tensors = load_file(file)
    tensors[name][place] = value
    save_file(tensors, file, content.head.layer_metadata(3))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    write_manifest(tmp_path, content.head, {3: entry.model_copy(update={"sha256": digest})})
    assert validate_checkpoint(tmp_path).findings == ()
    (finding,) = validate_checkpoint(tmp_path, data=True).findings
    assert finding.code == "container-invalid"
    assert words in finding.message


def test_headers_of_pair_rates_are_held_to_the_fewest_bytes(tmp_path: Path) -> None:
    content = random_pair_content()
    entry = write_content(tmp_path, content)
    tensors = load_file(tmp_path / entry.file) | {"codes": np.zeros((16, 4096), np.uint8)}
    save_file(tensors, tmp_path / entry.file, content.head.layer_metadata(3))
    write_manifest(tmp_path, content.head, {3: entry})
    (finding,) = validate_checkpoint(tmp_path).findings
    assert "rows of codes have 4096 bytes, the payload is at least 9216" in finding.message


def test_sign_patterns_are_one_for_each_expert(tmp_path: Path) -> None:
    content = random_content(experts=2, hidden=512, intermediate=256, transform=True)
    entry = write_content(tmp_path, content)
    tensors = load_file(tmp_path / entry.file) | {"sign_pattern": np.zeros(3, np.uint8)}
    save_file(tensors, tmp_path / entry.file, content.head.layer_metadata(3))
    write_manifest(tmp_path, content.head, {3: entry})
    (finding,) = validate_checkpoint(tmp_path).findings
    assert "sign_pattern has shape [3], expected [2]" in finding.message


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_files_beside_the_layers(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    (path / "trellis-names.json").write_text('{"schema": "other"}')
    (path / "trellis-exl3-config.json").write_text("[")
    write_json(path / "config.json", CONFIG | {"num_experts": "many"})
    write_shard(path / "outside-00002-of-00002.safetensors", {"norm.weight": np.ones(1, np.float16)})
    report = validate_checkpoint(path)
    assert sorted(errors(report)) == [
        ("broken-checkpoint", "outside-00002-of-00002.safetensors"),
        ("config-invalid", "config.json"),
        ("json-invalid", "trellis-exl3-config.json"),
        ("json-invalid", "trellis-names.json"),
    ]
    layers = {"0": {"prefix": "p", "words": {"gate": "g", "down": "d"}}}
    write_json(path / "trellis-names.json", {"schema": "trellis-format/names", "schema_version": 1, "layers": layers})
    assert any("no name for up" in finding.message for finding in validate_checkpoint(path).findings)
    (path / "config.json").write_text("[]")
    assert ("json-invalid", "config.json") in errors(validate_checkpoint(path))


@pytest.mark.parametrize(
    ("container", "name", "value", "words"),
    [
        ("exl3-v1", "codes", np.zeros((8, 5), np.uint8), "rows of codes have 5 bytes, the payload is "),
        ("exl3-v1", "codes", np.zeros((7, 1 << 17), np.uint8), "codes have 7 rows"),
        ("exl3-v1", "rotations", np.zeros((8, 2, 3, 32), np.float32), "rotations must be float16"),
        ("exl3-v1", "codes", np.zeros((8, 65537), np.uint8), "65537 bytes, not a multiple of row_alignment 4096"),
        ("exl3-v1", "rotations", np.zeros((8, 3, 3, 32), np.float16), "rotations has shape [8, 3, 3, 32]"),
        ("exl3-v1", "gate_suh", np.zeros(128, np.float16), "gate_suh has shape [128], expected [E,H] = [2, 128]"),
        ("native", "input_scales.vectors", np.zeros((3, 2, 128), np.float16), "must have shape [2, 2, 128]"),
        ("native", "output_scales.vectors", np.zeros((2, 128), np.uint8), "must be float16, got U8"),
        ("native", "codes", np.zeros((8, 5), np.uint8), "rows have 5 bytes, their payload is exactly"),
        ("native", "rate", np.full(1, 0x34, np.uint8), "0x34"),
    ],
)
def test_headers_decide_without_data(tmp_path: Path, container: str, name: str, value: Any, words: str) -> None:
    path = made(tmp_path, container)
    rewrite(path, container, lambda tensors: tensors.update({name: value}))
    (finding,) = validate_checkpoint(path).findings
    assert finding.code == "container-invalid"
    assert words in finding.message
