"""Holds the inspection of containers to the EXL3 checkpoint that they come from, and to what lies in their files."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from exl3_files import random_layer, random_linear, write_checkpoint, write_json
from slot_files import manifest_json, random_content, random_linears, random_pair_content
from trellis_format.cli import main
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer
from trellis_format.container.writer import write_content, write_manifest
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.errors import FormatError
from trellis_format.files.arrays import FileArray
from trellis_format.inspect import inspect_checkpoint
from trellis_format.native import writer as native_writer
from trellis_format.native.manifest import MANIFEST_NAME as NATIVE_MANIFEST
from trellis_format.report import Finding, InspectReport, Severity

CONTAINERS = ("exl3-v1", "native")
MANIFESTS = {"exl3-v1": "exl3-manifest.json", "native": NATIVE_MANIFEST}
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "num_experts": 2,
    "hidden_act": "silu",
    "quantization_config": {"quant_method": "exl3", "codebook": "mcg"},
}


def model() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        **random_layer(rng),
        **random_layer(rng, layer=2),
        **random_linear(rng, "model.layers.0.self_attn.q_proj", 128, 128, bits=5),
        **random_linear(rng, "lm_head", 128, 512, bits=6),
        "model.norm.weight": np.ones(128, np.float16),
    }


def made(folder: Path, container: str, config: Any = CONFIG) -> tuple[Path, Path]:
    """An EXL3 checkpoint and the same in a container."""
    source = write_checkpoint(folder / "source", model(), config=config)
    with closing(open_source(source)) as opened:
        convert(opened, folder / container, container)
    return source, folder / container


def written(folder: Path, content: ContainerLayer | ContainerPairLayer) -> Path:
    write_manifest(folder, content.head, {content.layer: write_content(folder, content)})
    return folder


def codes(report: InspectReport) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_is_told_as_its_source_is(tmp_path: Path, container: str) -> None:
    source, path = made(tmp_path, container)
    raw, report = inspect_checkpoint(source), inspect_checkpoint(path)
    assert report.findings == ()
    assert (raw.container, report.container) == ("exl3", container)
    assert report.model.model_dump(exclude={"activation"}) == raw.model.model_dump(exclude={"activation"})
    assert report.model.activation is not None
    assert report.model.activation.kind == "silu"
    for ours, theirs in zip(report.layers, raw.layers, strict=True):
        assert ours.model_dump(include={"index", "prefix", "readable", "experts", "hidden_size", "padded_hidden_size",
                                        "intermediate_size", "padded_intermediate_size", "up_divisor"}) == (
            theirs.model_dump(include={"index", "prefix", "readable", "experts", "hidden_size", "padded_hidden_size",
                                       "intermediate_size", "padded_intermediate_size", "up_divisor"})
        )  # fmt: skip
        assert ours.tensor_parallel == theirs.tensor_parallel
        for mine, yours in zip(ours.projections, theirs.projections, strict=True):
            assert mine.model_dump(exclude={"bytes"}) == yours.model_dump(exclude={"bytes"})
            assert mine.bytes == 2 * 128 * 256 * 3 // 8
        assert (ours.bits.linears, ours.bits.weights, ours.bits.codes) == (6, 6 * 128 * 256, 3)
        file = path / str(ours.file)
        assert ours.bytes == sum(tensor.nbytes for tensor in load_file(file).values())
        assert ours.bits.total == pytest.approx(ours.bytes * 8 / ours.bits.weights)
        assert ours.sha256 == json.loads((path / MANIFESTS[container]).read_text())["layers"][str(ours.index)]["sha256"]
    for name in ("linears", "head", "shared_experts"):
        assert getattr(report.bits_per_weight, name) == getattr(raw.bits_per_weight, name)
        assert getattr(report.bytes, name) == getattr(raw.bytes, name)
    assert report.bits_per_weight.experts.codes == 3
    assert report.bits_per_weight.model.codes == raw.bits_per_weight.model.codes
    assert report.bytes.others == 256
    assert report.bytes.total == sum(shard.bytes for shard in report.shards)
    assert report.transforms == raw.transforms.model_copy(update={"linears_with_vectors": 14})
    stated = {it.value for it in report.stated if it.field.rpartition(".")[2] == "quant_method"}
    assert stated == ({"b12x_trellis"} if container == "native" else set())


@pytest.mark.parametrize("container", CONTAINERS)
def test_headers_alone_are_read(tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = made(tmp_path, container)
    read: list[str] = []
    whole = FileArray.read
    monkeypatch.setattr(FileArray, "read", lambda array: (read.append(array.entry.name), whole(array))[1])
    monkeypatch.setattr(FileArray, "read_box", lambda *_: pytest.fail("data was read"))
    monkeypatch.setattr("hashlib.sha256", lambda *_: pytest.fail("a digest was computed"))
    inspect_checkpoint(path)
    assert set(read) == ({"rate"} if container == "native" else set())


def test_manifests_are_stated_key_by_key(tmp_path: Path) -> None:
    _, path = made(tmp_path, "exl3-v1")
    stated = {it.field: it.value for it in inspect_checkpoint(path).stated if it.file.endswith("exl3-manifest.json")}
    assert stated["codebook"] == "mcg"
    assert stated["rates.bits"] == "3"
    assert stated["hadamard.intermediate_hadamard"] == "false"
    assert stated["layout.extent_alignment_slots"] == "4"
    assert not any(key.startswith(("layers", "geometry")) for key in stated)


def test_pairs_are_named_and_cut_at_256_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, random_pair_content())
    report = inspect_checkpoint(path)
    (layer,) = report.layers
    assert (layer.pair_kinds, layer.readable, layer.prefix) == (("P24", "P33", "P43"), False, "")
    assert layer.tensor_parallel is not None
    assert (layer.tensor_parallel.alignment_slots, layer.tensor_parallel.even) == (8, (1, 2))
    assert {projection.bytes for projection in layer.projections} == {None}
    assert (layer.bits.codes, report.bits_per_weight.experts.codes) == (None, None)
    assert layer.bits.total == pytest.approx(layer.bytes * 8 / (2 * 3 * 128 * 512))
    note = codes(report)["not-described"]
    assert note.severity is Severity.NOTE
    assert "pair rates of kinds P24, P33, P43" in note.message
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "pairs P24, P33, P43" in out
    assert f"3      exl3-layer-00003.safetensors  {layer.sha256}" in out


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_transform_bars_the_half(tmp_path: Path, container: str, capsys: pytest.CaptureFixture[str]) -> None:
    if container == "exl3-v1":
        path = written(tmp_path, random_content(experts=2, intermediate=768, transform=True))
    else:
        layer = random_linears(experts=2, hidden=512, intermediate=768, rates=(3,), codebook="mcg", transform=True)
        head = native_writer.plan_head({3: layer[0]})
        path = tmp_path
        native_writer.write_manifest(path, head, {3: native_writer.write_layer(path, head, 3, *layer)})
    report = inspect_checkpoint(path)
    (summary,) = report.layers
    assert summary.readable
    assert summary.tensor_parallel is not None
    assert (summary.tensor_parallel.barriers, summary.tensor_parallel.even) == ((12,), (2, 6))
    assert report.transforms.expert == "intermediate_hadamard, blocks of 512 and 128 channels"
    assert main(["inspect", str(path)]) == 0
    assert "intermediate_hadamard, blocks of 512" in capsys.readouterr().out


def test_sizes_that_no_reader_takes_are_told_all_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, random_content(experts=1, hidden=128, intermediate=96, alignment=1))
    report = inspect_checkpoint(path)
    (layer,) = report.layers
    assert (layer.intermediate_size, layer.readable) == (96, False)
    assert layer.tensor_parallel is not None
    assert (layer.tensor_parallel.even, layer.tensor_parallel.largest) == ((), 0)
    assert "128" in codes(report)["not-described"].message


@pytest.mark.parametrize("change", ["group", "projection"])
def test_native_layers_that_are_not_handled_are_notes(tmp_path: Path, change: str) -> None:
    _, path = made(tmp_path, "native")
    manifest = json.loads((path / NATIVE_MANIFEST).read_text())
    config = manifest["quantization_config"]["b12x_trellis"]
    if change == "group":
        config["rate"]["group_size"] = 128
    else:
        config["transform"]["projection"] = {"kind": "none"}
    write_json(path / NATIVE_MANIFEST, manifest)
    report = inspect_checkpoint(path)
    assert not report.has_errors
    assert "not handled" in codes(report)["not-described"].message
    assert [layer.readable for layer in report.layers] == [False, False]
    if change == "projection":
        assert (report.transforms.kind, report.transforms.block_size) == ("none", 0)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_broken_layer_hides_no_other(tmp_path: Path, container: str) -> None:
    _, path = made(tmp_path, container)
    first, second = sorted(path.glob("*layer*.safetensors"))
    first.write_bytes(b"short")
    report = inspect_checkpoint(path)
    assert [layer.readable for layer in report.layers] == [False, True]
    assert report.layers[0].hidden_size is None
    finding = codes(report)["container-invalid"]
    assert finding.file == str(first)
    second.unlink()
    report = inspect_checkpoint(path)
    assert [layer.readable for layer in report.layers] == [False, False]
    assert main(["inspect", str(path)]) == 1
    assert main(["inspect", str(path), "--json"]) == 1


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_manifest_that_breaks_a_rule_cannot_be_opened(tmp_path: Path, container: str) -> None:
    (tmp_path / MANIFESTS[container]).write_text('{"kind": 1}')
    with pytest.raises(FormatError, match=MANIFESTS[container]):
        inspect_checkpoint(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 1


@pytest.mark.parametrize("container", CONTAINERS)
def test_configurations_are_compared(tmp_path: Path, container: str) -> None:
    _, path = made(tmp_path, container)
    write_json(path / "config.json", CONFIG | {"hidden_size": 700, "num_experts": 1})
    report = inspect_checkpoint(path)
    assert set(codes(report)) == {"hidden-size", "expert-count"}
    (path / "config.json").unlink()
    report = inspect_checkpoint(path)
    assert set(codes(report)) == {"config-missing"} | ({"activation"} if container == "exl3-v1" else set())
    (path / "config.json").write_text('{"hidden_size": "x"}')
    report = inspect_checkpoint(path)
    assert "config-invalid" in codes(report)
    assert not any(layer.readable for layer in report.layers)


def test_true_widths_come_from_the_configuration(tmp_path: Path) -> None:
    _, path = made(tmp_path, "exl3-v1")
    write_json(path / "config.json", CONFIG | {"hidden_size": 100, "moe_intermediate_size": 200})
    layer = inspect_checkpoint(path).layers[0]
    assert (layer.hidden_size, layer.padded_hidden_size) == (100, 128)
    assert (layer.intermediate_size, layer.padded_intermediate_size) == (200, 256)


def test_names_that_break_a_rule_are_a_finding(tmp_path: Path) -> None:
    _, path = made(tmp_path, "native")
    write_json(path / "trellis-names.json", {"schema": "other"})
    report = inspect_checkpoint(path)
    assert codes(report)["container-invalid"].file == str(path / "trellis-names.json")
    assert {layer.prefix for layer in report.layers} == {""}


def test_a_claim_of_many_experts_takes_no_time(tmp_path: Path) -> None:
    data = manifest_json(experts=10**12, hidden=128, intermediate=256)
    write_json(tmp_path / "exl3-manifest.json", data)
    (tmp_path / "exl3-layer-00003.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    report = inspect_checkpoint(tmp_path)
    assert report.has_errors
