"""Holds the native manifest to its schema, and the objects it holds to what they mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from format.native.test_config import GLM, K3
from slot_files import edited
from trellis_format.activations import Activation
from trellis_format.errors import FormatNotFoundError, FormatTypeError, FormatValueError
from trellis_format.native.config import parse_config
from trellis_format.native.manifest import (
    MANIFEST_NAME,
    NativeActivation,
    NativeGeometry,
    NativeManifest,
    layer_file_name,
    parse_manifest,
    read_manifest,
)
from trellis_format.source import ExpertGeometry, Projection

GOOD: dict[str, Any] = {
    "kind": "trellis-manifest",
    "schema": "trellis-native-v1",
    "quantization_config": parse_config(GLM).quantization_config(),
    "geometry": {
        "num_experts": 4,
        "hidden_size": 500,
        "intermediate_size": 256,
        "padded_hidden_size": 512,
        "padded_intermediate_size": 256,
        "projections": ["gate", "up", "down"],
    },
    "activation": {"kind": "swigluoai", "limit": 7.0, "alpha": 1.702, "beta": 1.0},
    "layers": {
        "0": {"file": "trellis-layer-00000.safetensors", "sha256": "0" * 64},
        "12": {
            "file": "trellis-layer-00012.safetensors",
            "sha256": "aF" * 32,
            "biased": ["gate", "down"],
            "up_divisor": 128.0,
        },
    },
}


def test_parse_then_emit_is_the_same_json() -> None:
    manifest = parse_manifest(GOOD)
    assert manifest.to_json() == GOOD
    assert manifest.indices == (0, 12)
    assert manifest.config == parse_config(GLM)
    assert NativeManifest.of(manifest, {int(key): entry for key, entry in manifest.layers.items()}) == manifest
    bare = edited(GOOD, "activation")
    assert parse_manifest(bare).to_json() == bare


def test_it_is_read_from_its_directory(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match=MANIFEST_NAME):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(GOOD))
    assert read_manifest(tmp_path) == parse_manifest(GOOD)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(edited(GOOD, "kind", "x")))
    with pytest.raises(FormatValueError, match=rf"{MANIFEST_NAME}: kind: Input should be 'trellis-manifest'"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text('{"kind": 1, "kind": 2}')
    with pytest.raises(FormatValueError, match="duplicate key 'kind'"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "path", ["kind", "schema", "quantization_config", "geometry", "layers", "geometry.projections"]
)
def test_keys_are_required(path: str) -> None:
    with pytest.raises(FormatValueError, match=rf"{path}: missing key"):
        parse_manifest(edited(GOOD, path))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("schema", "trellis-native-v2", "schema: Input should be 'trellis-native-v1'"),
        ("stray", 1, "stray: unknown key"),
        ("geometry.stray", 1, r"geometry\.stray: unknown key"),
        ("geometry.num_experts", 0, r"geometry\.num_experts: .*greater than 0"),
        ("geometry.padded_hidden_size", 640, r"geometry\.sizes: hidden_size 500 is stored in 512 channels, not in 640"),
        ("geometry.projections", ["down", "up"], r"geometry\.projections: projections must be gate, up, down or"),
        ("geometry.projections", ["gate", "w2"], r"geometry\.projections\[1\]: Input should be"),
        ("activation", {"kind": "tanh"}, r"activation\.kind: unknown activation 'tanh'"),
        ("activation", {"kind": "silu", "limit": -1.0}, r"activation\.kind: activation limit -1\.0 must be above 0"),
        ("quantization_config.quant_method", "exl3", r"quantization_config\.quant_method: Input should be"),
        ("quantization_config.b12x_trellis.codebook", "x", r"quantization_config\.b12x_trellis\.codebook: unknown"),
        ("layers", {}, "layers: must have at least one layer"),
        ("layers.0.sha256", "0" * 63, r"layers\.0\.sha256: String should match"),
        ("layers.0.file", "../0.safetensors", r"layers\.0\.file: must be 'trellis-layer-00000\.safetensors', got"),
        ("layers.12.biased", ["down", "gate"], r"layers\.12\.biased: must be in order"),
        ("layers.12.up_divisor", 0.0, r"layers\.12\.up_divisor: .*greater than 0"),
        ("layers.12.stray", 0, r"layers\.12\.stray: unknown key"),
    ],
)
def test_wrong_values_are_named_by_path(path: str, value: Any, text: str) -> None:
    with pytest.raises(FormatValueError, match=f"^m: {text}"):
        parse_manifest(edited(GOOD, path, value), file="m")


@pytest.mark.parametrize("key", ["00", "-1", "1.0", "", "x", "\u0663", "9" * 400])
def test_keys_of_layers_are_decimal(key: str) -> None:
    layers = {key: {"file": "trellis-layer-00000.safetensors", "sha256": "0" * 64}}
    with pytest.raises(FormatValueError, match="must be the index of a layer in decimal"):
        parse_manifest(edited(GOOD, "layers", layers))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("geometry.num_experts", True), ("geometry.hidden_size", 500.0), ("layers", []), ("layers.0", "file"),
        ("activation.limit", "inf"), ("layers.0.sha256", 0), ("layers.12.biased", "gate"), ("activation", None),
    ],
)  # fmt: skip
def test_wrong_json_types_are_type_errors(path: str, value: Any) -> None:
    with pytest.raises(FormatTypeError, match=f"{path} must be".replace(".", r"\.")):
        parse_manifest(edited(GOOD, path, value))


def test_sizes_are_those_of_experts() -> None:
    geometry = ExpertGeometry(
        num_experts=4,
        hidden_size=500,
        intermediate_size=256,
        padded_hidden_size=512,
        padded_intermediate_size=256,
    )
    assert parse_manifest(GOOD).geometry.geometry() == geometry
    assert NativeGeometry.of(geometry) == parse_manifest(GOOD).geometry
    assert NativeGeometry.of(geometry).projections == tuple(name.value for name in Projection)


@pytest.mark.parametrize(
    "law",
    [
        Activation("silu"),
        Activation("relu2"),
        Activation("silu", limit=10.0),
        Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0),
    ],
)
def test_activations_survive(law: Activation) -> None:
    stored = NativeActivation.of(law)
    assert stored.activation() == law
    assert (stored.limit is None) == math.isinf(law.limit)
    assert "Infinity" not in json.dumps(stored.model_dump(exclude_none=True))


def test_tensors_follow_the_configuration() -> None:
    plain = {"codes", "rate", "input_scales.vectors", "intermediate_scales.vectors", "output_scales.vectors"}
    manifest = parse_manifest(GOOD)
    assert manifest.tensor_names(()) == plain
    assert manifest.tensor_names(("gate", "down")) == plain | {"bias.gate", "bias.down"}
    gained = parse_manifest(edited(GOOD, "quantization_config", parse_config(K3).quantization_config()))
    gains = {"input_scales.gains", "intermediate_scales.gains", "output_scales.gains", "expert_sign_patterns"}
    assert gained.tensor_names(()) == plain | gains


def test_names_and_metadata_of_layers() -> None:
    assert layer_file_name(3) == "trellis-layer-00003.safetensors"
    assert layer_file_name(123456) == "trellis-layer-123456.safetensors"
    assert parse_manifest(GOOD).layer_metadata(12) == {
        "schema": "trellis-native-v1",
        "codebook": "mcg",
        "layer": "12",
        "num_experts": "4",
        "hidden_size": "500",
        "intermediate_size": "256",
    }
