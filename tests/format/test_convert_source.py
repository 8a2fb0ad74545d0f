"""Holds the reading side of conversion to what each container's directory holds."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import expert_name, random_layer, write_checkpoint, write_json, write_shard
from trellis_format.convert import convert
from trellis_format.convert_names import NAMES_FILE
from trellis_format.convert_source import open_source
from trellis_format.detect import CONTAINERS, container_of
from trellis_format.errors import FormatError, FormatNotFoundError, FormatUnsupportedError, FormatValueError
from trellis_format.slots import read_linear

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


def made(folder: Path, container: str, **more: Any) -> Path:
    """The same layer and the same norm in any container."""
    tensors = random_layer(np.random.default_rng(0), layer=5) | {"norm.weight": np.ones(128, np.float16)} | more
    source = write_checkpoint(folder / "source", tensors, config=CONFIG)
    (source / "tokenizer.json").write_text("{}")
    if container == "exl3":
        return source
    with closing(open_source(source)) as opened:
        convert(opened, folder / container, container)
    return folder / container


@pytest.mark.parametrize("container", CONTAINERS)
def test_each_container_gives_the_same(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    assert container_of(path) == container
    with closing(open_source(path)) as source:
        assert (source.container, source.layers) == (container, (5,))
        assert [tensor.name for tensor in source.outside] == ["norm.weight"]
        kept = [] if container == "exl3" else ["trellis-exl3-config.json"]
        assert [file.name for file in source.files()] == ["config.json", "tokenizer.json", *kept]
        assert source.names[5].prefix == "model.layers.5.mlp.experts"
        described, weights = source.read_layer(5)
        assert described.activation is not None
        assert described.activation.kind == "silu"
        tiles = read_linear(described, weights, 1, 2)
        expected = random_layer(np.random.default_rng(0), layer=5)[f"{expert_name(5, 1, 'down_proj')}.trellis"]
        assert np.array_equal(tiles, expected)


@pytest.mark.parametrize("container", CONTAINERS)
def test_identity_follows_every_file(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    with closing(open_source(path)) as source:
        before = source.identity()
        assert source.identity() == before
        (path / "tokenizer.json").write_text("[]")
        assert source.identity() != before


@pytest.mark.parametrize("container", ["exl3-v1", "native"])
def test_names_that_are_not_kept_are_those_of_qwen3(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    (path / NAMES_FILE).unlink()
    with closing(open_source(path)) as source:
        assert source.names[5].prefix == "model.layers.5.mlp.experts"


def test_two_layers_of_one_index_are_refused(tmp_path: Path) -> None:
    tensors = random_layer(np.random.default_rng(0))
    tensors |= {f"mtp.{name}": tensor for name, tensor in tensors.items()}
    path = write_checkpoint(tmp_path, tensors, config=CONFIG)
    with pytest.raises(FormatUnsupportedError, match=r"layer 0 has experts under .* and "):
        open_source(path)


def test_tensors_of_a_name_that_other_files_have_are_found_when_they_are_written(tmp_path: Path) -> None:
    path = made(tmp_path, "native")
    name = f"{expert_name(5, 0, 'up_proj')}.suh"
    write_shard(path / "more.safetensors", {name: np.ones(3, np.float16)})
    with closing(open_source(path)) as source, pytest.raises(FormatValueError, match=f"{name}: two tensors"):
        convert(source, tmp_path / "out", "exl3")


def test_names_that_lack_a_projection_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path, "native")
    layers = {"5": {"prefix": "p", "words": {"gate": "g", "down": "d"}}}
    write_json(path / NAMES_FILE, {"schema": "trellis-format/names", "schema_version": 1, "layers": layers})
    with closing(open_source(path)) as source, pytest.raises(FormatValueError, match="no name for up"):
        convert(source, tmp_path / "out", "exl3")


def test_gains_are_not_folded_into_vectors(tmp_path: Path) -> None:
    path = made(tmp_path, "native")
    manifest = json.loads((path / "trellis-manifest.json").read_text())
    manifest["quantization_config"]["b12x_trellis"]["scale"]["output_scales"]["gains"] = "uniform"
    write_json(path / "trellis-manifest.json", manifest)
    with closing(open_source(path)) as source:
        with pytest.raises(FormatUnsupportedError, match="output_scales are vectors times gains"):
            source.read_layer(5)
        assert source.layers == (5,)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match="no such checkpoint directory"):
        container_of(tmp_path / "no")
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatValueError, match="is a directory, this is a file"):
        container_of(tmp_path / "file")
    for name in ("exl3-manifest.json", "trellis-manifest.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(FormatValueError, match="the manifests of two containers"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["exl3-manifest.json", "trellis-manifest.json"])
def test_a_manifest_that_breaks_a_rule(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"kind": 1}')
    with pytest.raises(FormatError, match=name):
        open_source(tmp_path)
