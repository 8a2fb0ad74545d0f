"""Holds layer files of either container to one interface: names, digests, checked headers, facts and content."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exl3_files import random_layer, write_checkpoint
from trellis_format.activations import Activation
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.errors import FormatError, FormatValueError
from trellis_format.files import read_header
from trellis_format.files.layer_file import file_sha256
from trellis_format.layer_files import LayerFiles, open_layer_files

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


@pytest.fixture(name="files", params=["exl3-v1", "native"])
def _files(tmp_path: Path, request: pytest.FixtureRequest) -> LayerFiles:
    tensors = random_layer(np.random.default_rng(0), layer=7) | random_layer(np.random.default_rng(1), layer=2)
    source = write_checkpoint(tmp_path / "source", tensors, config=CONFIG)
    with closing(open_source(source)) as opened:
        convert(opened, tmp_path / request.param, request.param)
    return open_layer_files(tmp_path / request.param, request.param)


def test_layers_are_those_of_the_manifest(files: LayerFiles) -> None:
    assert list(files.names) == [2, 7]
    assert files.digests == {layer: file_sha256(files.path / name) for layer, name in files.names.items()}
    assert (files.path / files.manifest_name).exists()
    assert (files.codebook, [name.value for name in files.projections]) == ("mcg", ["gate", "up", "down"])
    assert (files.alignment_slots, files.barriers, files.transform) == (4, (), None)
    assert dict(files.statements())[
        "codebook" if files.manifest_name.startswith("exl3") else "quantization_config.b12x_trellis.codebook"
    ] == ("mcg")


def test_facts_agree_with_content(files: LayerFiles) -> None:
    with files.open(7) as file:
        facts = files.facts(7, file)
    source, _ = files.read(7, activation=Activation("situ"))
    assert source.activation == Activation("situ")
    assert (facts.rates, facts.geometry, facts.biased) == (source.rates, source.geometry, source.biased)
    assert (facts.num_experts, facts.hidden_size, facts.intermediate_size) == (2, 128, 256)
    assert (facts.up_divisor, facts.obstacle) == (1.0, None)


def test_a_header_is_checked_when_it_is_opened(files: LayerFiles) -> None:
    path = files.path / files.names[2]
    tensors = load_file(path)
    save_file(tensors | {"more": np.zeros(1, np.uint8)}, path, {"schema": "x"})
    with pytest.raises(FormatError, match="unexpected: \\['more'\\]"):
        files.open(2)
    save_file(tensors, path, {"schema": "x"})
    with pytest.raises(FormatError, match="metadata schema says 'x'"):
        files.open(2)


def test_only_containers_have_layer_files(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="'exl3' has no layer files; those that do: exl3-v1, native"):
        open_layer_files(tmp_path, "exl3")


def test_a_manifest_must_be_there_and_sound(tmp_path: Path) -> None:
    for container, name in (("exl3-v1", "exl3-manifest.json"), ("native", "trellis-manifest.json")):
        with pytest.raises(FormatError, match="no such file"):
            open_layer_files(tmp_path, container)
        (tmp_path / name).write_text(json.dumps({"kind": "other"}))
        with pytest.raises(FormatError, match="kind"):
            open_layer_files(tmp_path, container)


def test_a_value_that_breaks_a_rule_names_its_file(files: LayerFiles) -> None:
    path = files.path / files.names[7]
    tensors = load_file(path)
    metadata = read_header(path).metadata
    name = "gate_suh" if "gate_suh" in tensors else next(key for key in tensors if "input" in key)
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, path, metadata)
    with pytest.raises(FormatValueError, match="finite") as caught:
        files.read(7, verify=False)
    assert caught.value.file == str(path)
    with closing(open_source(files.path)) as opened, pytest.raises(FormatValueError, match="finite") as caught:
        opened.read_layer(7, verify=False)
    assert caught.value.file == str(path)
