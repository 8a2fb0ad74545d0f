"""Holds the container's manifest to its schema: exact round trips, and each wrong key by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slot_files import edited, manifest_json
from trellis_format.codebooks import CODEBOOKS
from trellis_format.container.manifest import (
    CONTAINER_BITS,
    MANIFEST_NAME,
    PAIR_KINDS,
    LayerEntry,
    Manifest,
    layer_file_name,
    parse_manifest,
    read_manifest,
)
from trellis_format.errors import FormatNotFoundError, FormatTypeError, FormatValueError
from trellis_format.rate_bytes import unpack_rates
from trellis_format.rates import Rate

UNIFORM = manifest_json()
TRANSFORM = manifest_json(codebook="lut_e4m3", bits=2, transform=True, per_expert=False)
PAIRS = manifest_json(kinds=("P33", "P43"), alignment=8)
EACH = pytest.mark.parametrize("data", [UNIFORM, TRANSFORM, PAIRS], ids=["uniform", "transform", "pairs"])
OPTIONAL = {"layout.extent_barriers"}


def paths(data: Any, prefix: str = "") -> list[str]:
    if not isinstance(data, dict):
        return []
    return [f"{prefix}{key}" for key in data] + [
        path for key, value in data.items() for path in paths(value, f"{prefix}{key}.")
    ]


@EACH
def test_parse_then_emit_is_the_same_json(data: dict[str, Any]) -> None:
    manifest = parse_manifest(json.loads(json.dumps(data)))
    assert manifest.to_json() == data
    assert Manifest.of(manifest, {3: manifest.entry(3)}) == manifest
    bare = edited(data, "layout.extent_barriers")
    assert parse_manifest(bare).to_json() == bare


@EACH
def test_every_key_is_required_and_no_other_is_known(data: dict[str, Any]) -> None:
    for path in paths(data):
        if path not in OPTIONAL:
            with pytest.raises(FormatValueError) as caught:
                parse_manifest(edited(data, path))
            assert path.split(".")[-1] in str(caught.value)
        parent = path.rpartition(".")[0]
        if parent != "layers":
            stray = f"{parent}.stray" if parent else "stray"
            with pytest.raises(FormatValueError, match=f"{stray}: unknown key".replace(".", r"\.")):
                parse_manifest(edited(data, stray, 1))


@EACH
@pytest.mark.parametrize("wrong", [None, 1.5])
def test_no_key_takes_another_json_type(data: dict[str, Any], wrong: Any) -> None:
    for path in paths(data):
        with pytest.raises(FormatTypeError, match=f"^m: {path} must be .*, got {type(wrong).__name__}$"):
            parse_manifest(edited(data, path, wrong), file="m")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("geometry.num_experts", True),
        ("geometry.moe_layer_indices", {"3": 1}),
        ("geometry.moe_layer_indices", [True]),
        ("hadamard.intermediate_hadamard", 0),
        ("hadamard.per_expert_input_rotations", "true"),
        ("rates.bits", "3"),
        ("layout.extent_barriers", "8"),
        ("layout.extent_barriers", ["8"]),
        ("schema", 1),
        ("codebook_seed", True),
        ("layers", []),
        ("layers.3", "file"),
        ("layers.3.sha256", 7),
    ],
)
def test_booleans_strings_and_arrays_are_not_taken_for_others(path: str, value: Any) -> None:
    with pytest.raises(FormatTypeError, match=f"^{path}".replace(".", r"\.")):
        parse_manifest(edited(UNIFORM, path, value))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("kind", "btx-manifest", r"kind: Input should be 'exl3-manifest'"),
        ("schema", "exl3-v2", r"schema: Input should be 'exl3-v1'"),
        ("codebook", "mul1", r"codebook: Input should be 'mcg', 'lut_e4m3' or 'lut_fp16', got 'mul1'"),
        ("codebook_seed", 0x83DCD12D, r"codebook_seed: must be 0xCBAC1FED \(3417055213\) .* got 0x83DCD12D"),
        ("codebook", "lut_e4m3", r"codebook_seed: is unknown for codebook lut_e4m3, got 0xCBAC1FED"),
        ("geometry.num_experts", 0, r"geometry\.num_experts: .*greater than 0"),
        ("geometry.hidden_size", 520, r"geometry\.hidden_size: .*multiple of 16, got '520'"),
        ("geometry.intermediate_size", 3000, r"geometry\.intermediate_size: .*multiple of 32, got '3000'"),
        ("geometry.slot_channels", 16, r"geometry\.slot_channels: Input should be 32, got '16'"),
        ("geometry.num_slots", 95, r"geometry\.num_slots: is 95, 3072 channels are 96 slots"),
        ("geometry.moe_layer_indices", [], r"geometry\.moe_layer_indices: must name at least one layer"),
        ("geometry.moe_layer_indices", [3, 3], r"geometry\.moe_layer_indices: must be distinct, got \[3, 3\]"),
        ("geometry.moe_layer_indices", [-3], r"geometry\.moe_layer_indices\[0\]: .*greater than or equal to 0"),
        ("rates.structure", "mixed", r"rates\.structure: Input should be 'uniform' or 'per_expert_pair'"),
        ("rates.bits", 7, r"rates\.bits: .*less than or equal to 6"),
        ("rates.bits", 2, r"rates\.bits: codebook mcg has no K = 2 here; legal K: 3, 4, 5, 6"),
        ("rates.pair_kinds", ["P33"], r"rates\.pair_kinds: unknown key for structure 'uniform'"),
        ("rates", {"structure": "uniform"}, r"rates\.bits: missing key for structure 'uniform'"),
        ("rates", {"structure": "per_expert_pair", "bits": 3}, r"rates\.bits: unknown key for structure 'per_expert_p"),
        ("rates", {"structure": "per_expert_pair"}, r"rates\.pair_kinds: missing key"),
        ("rates", {"structure": "per_expert_pair", "pair_kinds": []}, r"rates\.pair_kinds: must be distinct and at le"),
        (
            "rates",
            {"structure": "per_expert_pair", "pair_kinds": ["P33", "P33"]},
            r"rates\.pair_kinds: must be distinct",
        ),
        ("rates", {"structure": "per_expert_pair", "pair_kinds": ["P34"]}, r"rates\.pair_kinds\[0\]: Input should be"),
        (
            "rates",
            {"structure": "per_expert_pair", "pair_kinds": ["P24"]},
            r"rates\.pair_kinds: codebook mcg has no K = 2 here",
        ),
        ("hadamard.pre_block", 512, r"hadamard\.pre_block: unknown key where intermediate_hadamard is false"),
        ("hadamard.intermediate_hadamard", True, r"hadamard\.pre_block: missing key where intermediate_hadamard is tr"),
        ("layout.row_alignment", 0, r"layout\.row_alignment: .*greater than 0"),
        ("layout.extent_alignment_slots", 0, r"layout\.extent_alignment_slots: .*greater than 0"),
        ("layout.extent_alignment_slots", 5, r"layout\.extent_alignment_slots: 5 does not divide the 96 slots"),
        ("layout.extent_barriers", [0], r"layout\.extent_barriers: must be distinct slots in 1\.\.95, got \[0\]"),
        ("layout.extent_barriers", [96], r"layout\.extent_barriers: must be distinct slots in 1\.\.95"),
        ("layout.extent_barriers", [8, 8], r"layout\.extent_barriers: must be distinct"),
        ("layers.3.file", "exl3-layer-00004.safetensors", r"layers\.3\.file: must be 'exl3-layer-00003\.safetensors'"),
        ("layers.3.file", "../exl3-layer-00003.safetensors", r"layers\.3\.file: must be"),
        ("layers.3.sha256", "0" * 63, r"layers\.3\.sha256: String should match"),
        ("layers.3.sha256", "g" * 64, r"layers\.3\.sha256: String should match"),
        ("layers.3.sha256", "0" * 64 + "\n", r"layers\.3\.sha256: String should match"),
        ("layers", {}, r"layers: must have exactly the decimal keys .*unexpected: \[\], missing: \['3'\]"),
    ],
)
def test_wrong_values_are_named_by_path(path: str, value: Any, text: str) -> None:
    with pytest.raises(FormatValueError, match=f"^m: {text}"):
        parse_manifest(edited(UNIFORM, path, value), file="m")


@pytest.mark.parametrize("key", ["03", "3.0", " 3", "4", "\u0663"])
def test_keys_of_layers_are_those_of_the_geometry(key: str) -> None:
    layers = {key: UNIFORM["layers"]["3"]}
    with pytest.raises(FormatValueError, match=r"layers: must have exactly .*missing: \['3'\]"):
        parse_manifest(edited(UNIFORM, "layers", layers))


def test_mcg_needs_its_seed() -> None:
    with pytest.raises(FormatValueError, match=r"codebook_seed: must be 0xCBAC1FED .* got nothing"):
        parse_manifest(edited(UNIFORM, "codebook_seed"))


def test_blocks_must_divide_their_axes() -> None:
    with pytest.raises(FormatValueError, match=r"hadamard\.pre_block: 384 does not divide hidden_size 512"):
        parse_manifest(edited(TRANSFORM, "hadamard.pre_block", 384))
    with pytest.raises(FormatValueError, match=r"hadamard\.post_block: 160 does not divide intermediate_size 3072"):
        parse_manifest(edited(TRANSFORM, "hadamard.post_block", 160))
    with pytest.raises(FormatValueError, match=r"hadamard\.post_block: .*multiple of 32"):
        parse_manifest(edited(TRANSFORM, "hadamard.post_block", 48))


def test_pairs_need_whole_pairs_of_slots() -> None:
    data = manifest_json(kinds=("P33",), intermediate=128)
    with pytest.raises(FormatValueError, match=r"rates\.structure: pair rates need slots in multiples of 8, got 4"):
        parse_manifest(data)


@pytest.mark.parametrize("codebook", CONTAINER_BITS)
def test_legal_rates_are_within_those_of_the_codebook(codebook: str) -> None:
    for bits in range(2, 7):
        data = manifest_json(codebook=codebook, bits=bits)
        if bits in CONTAINER_BITS[codebook]:
            assert parse_manifest(data).uniform_rate == Rate.of(bits)
            CODEBOOKS[codebook].check_rate(Rate.of(bits))
        else:
            with pytest.raises(FormatValueError, match=f"codebook {codebook} has no K = {bits} here"):
                parse_manifest(data)


def test_kinds_are_what_their_names_say() -> None:
    for kind, byte in PAIR_KINDS.items():
        assert f"P{''.join(str(rate) for rate in unpack_rates(byte))}" == kind
    pairs = parse_manifest(PAIRS)
    assert pairs.uniform_rate is None
    assert pairs.rates.distinct() == {3, 4}


def test_tensors_follow_the_manifest() -> None:
    plain = {"codes", "rotations", "gate_suh", "up_suh", "down_svh"}
    assert parse_manifest(UNIFORM).tensor_names() == plain
    assert parse_manifest(TRANSFORM).tensor_names() == plain | {"sign_pattern"}
    assert parse_manifest(PAIRS).tensor_names() == plain | {"rates_fc1", "rates_fc2"}


def test_metadata_of_a_layer_is_strings() -> None:
    assert parse_manifest(UNIFORM).layer_metadata(3) == {
        "schema": "exl3-v1",
        "codebook": "mcg",
        "layer": "3",
        "num_experts": "3",
        "hidden_size": "512",
        "intermediate_size": "3072",
        "slot_channels": "32",
    }


def test_it_is_read_from_its_directory(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match=MANIFEST_NAME):
        read_manifest(tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_text(json.dumps(UNIFORM))
    assert read_manifest(tmp_path) == parse_manifest(UNIFORM)
    path.write_text(json.dumps(UNIFORM)[:-1])
    with pytest.raises(FormatValueError, match=f"{MANIFEST_NAME}: not JSON"):
        read_manifest(tmp_path)
    path.write_text('{"kind": 1, "kind": 2}')
    with pytest.raises(FormatValueError, match="duplicate key 'kind'"):
        read_manifest(tmp_path)
    path.write_text("[" * 100 + "]" * 100)
    with pytest.raises(FormatValueError, match="nests 100 deep"):
        read_manifest(tmp_path)


def test_entries_must_be_those_of_the_head() -> None:
    head = parse_manifest(UNIFORM)
    entry = LayerEntry(file=layer_file_name(4), sha256="0" * 64)
    with pytest.raises(FormatValueError, match=r"unexpected: \['4'\], missing: \[\]"):
        Manifest.of(head, {3: head.entry(3), 4: entry})
    assert layer_file_name(123456) == "exl3-layer-123456.safetensors"
