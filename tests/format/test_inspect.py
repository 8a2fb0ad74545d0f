"""Holds the inspection to the files: its numbers, what is skipped, and a finding for each thing that is wrong."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import Raw, random_layer, random_linear, write_bytes, write_checkpoint, write_json, write_shard
from trellis_format.checkpoint import INDEX_NAME, open_checkpoint
from trellis_format.errors import FormatError, FormatNotFoundError, FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import LayerKey, find_layer
from trellis_format.findings import MAX_FINDINGS_PER_CODE
from trellis_format.inspect import inspect_checkpoint
from trellis_format.report import Finding, InspectReport

RNG = np.random.default_rng(0)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "hidden_act": "silu",
    "quantization_config": {"quant_method": "exl3", "codebook": "mcg", "bits": 3.0, "head_bits": 6},
}
E0 = "model.layers.0.mlp.experts.0."
E1 = "model.layers.0.mlp.experts.1."


def small(**changes: Any) -> dict[str, Any]:
    """A small sound model: two experts, a head, attention, an embedding and a norm."""
    return {
        "model.embed_tokens.weight": np.zeros((512, 128), np.float16),
        **random_layer(RNG),
        **random_linear(RNG, "model.layers.0.self_attn.q_proj", 128, 128),
        **random_linear(RNG, "model.layers.0.mlp.shared_expert.up_proj", 128, 128, bits=4),
        **random_linear(RNG, "lm_head", 128, 512, bits=6),
        "model.layers.0.mlp.gate.weight": np.zeros((2, 128), np.float16),
        "model.norm.weight": Raw("BF16", (128,), bytes(256)),
    } | changes


def inspected(folder: Path, tensors: dict[str, Any], config: Any = CONFIG, **options: Any) -> InspectReport:
    names = {"shards", "index", "quantization"} & set(options)
    files = {name: options.pop(name) for name in names}
    return inspect_checkpoint(write_checkpoint(folder / "c", tensors, config=config, **files), **options)


def found(report: InspectReport, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def codes(report: InspectReport) -> set[str]:
    return {finding.code for finding in report.findings}


def nbytes(tensors: dict[str, Any], *parts: str) -> int:
    return sum(
        len(value.data) if isinstance(value, Raw) else np.asarray(value).nbytes
        for name, value in tensors.items()
        if any(part in name for part in parts)
    )


def test_a_sound_model_is_told_in_full(tmp_path: Path) -> None:
    tensors = small()
    report = inspected(tmp_path, tensors, shards=3, index=True)
    assert not report.has_errors
    assert codes(report) == {"storage-missing"}
    assert [shard.name for shard in report.shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sum(shard.tensors for shard in report.shards) == len(tensors)
    assert sum(shard.bytes for shard in report.shards) == report.bytes.total == nbytes(tensors, "")
    assert report.bytes.experts == nbytes(tensors, ".experts.")
    assert report.bytes.shared_experts == nbytes(tensors, "shared_expert")
    assert report.bytes.linears == nbytes(tensors, "q_proj")
    assert report.bytes.head == nbytes(tensors, "lm_head")
    assert report.bytes.embeddings == nbytes(tensors, "embed_tokens")
    assert report.bytes.others == nbytes(tensors, "mlp.gate.", "norm")
    (layer,) = report.layers
    assert (layer.index, layer.prefix, layer.experts) == (0, "model.layers.0.mlp.experts", 2)
    assert (layer.readable, layer.auxiliary, layer.up_divisor) == (True, False, 1.0)
    assert (layer.hidden_size, layer.padded_hidden_size) == (128, 128)
    assert (layer.intermediate_size, layer.padded_intermediate_size) == (256, 256)
    assert [projection.projection for projection in layer.projections] == ["gate", "up", "down"]
    assert layer.bytes == nbytes(tensors, ".experts.")
    assert layer.tensor_parallel is not None
    assert layer.tensor_parallel.even == (1, 2)
    bits = report.bits_per_weight
    assert (bits.experts.codes, bits.shared_experts.codes, bits.linears.codes, bits.head.codes) == (3, 4, 3, 6)
    assert report.model.activation is not None
    assert report.model.activation.source == "config.json hidden_act = 'silu'"
    assert report.model.activation.limit is None
    assert {stated.value for stated in report.stated} == {"exl3", "mcg", "3.0", "6"}
    assert {group.pattern: group.reason for group in report.skipped} == dict.fromkeys(
        ("model.embed_tokens.weight", "model.layers.*.mlp.gate.weight", "model.norm.weight"), "unquantised"
    )


def test_no_tensor_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "c", small(), config=CONFIG)

    def refuse(*_: object) -> int:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(os, "preadv", refuse)
    assert inspect_checkpoint(folder).layers[0].readable


def test_a_terabyte_of_holes_is_inspected_at_once(tmp_path: Path) -> None:
    header, offset = {}, 0
    for expert in range(64):
        for word, k, n in (("gate_proj", 16384, 65536), ("up_proj", 16384, 65536), ("down_proj", 65536, 16384)):
            module = f"model.layers.0.mlp.experts.{expert}.{word}"
            for name, dtype, shape in (
                ("trellis", "I16", [k // 16, n // 16, 128]), ("suh", "F16", [k]),
                ("svh", "F16", [n]), ("mcg", "I32", []),
            ):  # fmt: skip
                size = int(np.prod(shape, dtype=np.int64)) * (4 if dtype == "I32" else 2)
                header[f"{module}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
                offset += size
    folder = tmp_path / "c"
    folder.mkdir()
    path = write_bytes(folder / "model.safetensors", header)
    os.truncate(path, path.stat().st_size + offset)
    began = time.process_time()
    report = inspect_checkpoint(folder)
    assert time.process_time() - began < 1.0
    assert report.bytes.total == offset > 2e11
    assert report.layers[0].readable


def test_real_checkpoints_are_sound_and_quick(checkpoint_path: Path) -> None:
    began = time.process_time()
    report = inspect_checkpoint(checkpoint_path)
    assert time.process_time() - began < 1.0
    assert report.findings == ()
    config = json.loads((checkpoint_path / "config.json").read_text())
    stated = config["quantization_config"]
    with open_checkpoint(checkpoint_path) as checkpoint:
        assert report.bytes.total == checkpoint.nbytes
        for layer in report.layers:
            source, weights = trellis_from_exl3(find_layer(checkpoint, LayerKey(layer.index, layer.prefix)))
            assert (layer.hidden_size, layer.intermediate_size) == (
                source.geometry.hidden_size,
                source.geometry.intermediate_size,
            )
            assert layer.experts == source.geometry.num_experts
            assert {name for part in layer.projections for name in part.codebooks} == {source.codebook}
            assert {bits for part in layer.projections for bits in part.rates} == {
                str(r) for r in source.rates.distinct()
            }
            vectors = layer.bytes - source.code_bytes()
            assert layer.bits.total == pytest.approx(8 * layer.bytes / layer.bits.weights)
            assert vectors > sum(array.nbytes for array in weights.scale_arrays().values()) / 2
    assert {stated["codebook"]} == {
        name for layer in report.layers for part in layer.projections for name in part.codebooks
    }
    assert report.model.top_k == config["num_experts_per_tok"]
    if report.bits_per_weight.head.codes is not None:
        assert report.bits_per_weight.head.codes == stated["head_bits"]


def test_padding_and_the_activation_of_gpt_oss(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "hidden_size": 100, "intermediate_size": 130, "num_local_experts": 2}
    report = inspected(tmp_path, random_layer(RNG, bias=np.float16), config)
    (layer,) = report.layers
    assert (layer.hidden_size, layer.padded_hidden_size) == (100, 128)
    assert (layer.intermediate_size, layer.padded_intermediate_size) == (130, 256)
    assert [projection.biased for projection in layer.projections] == [2, 2, 2]
    law = report.model.activation
    assert law is not None
    assert (law.kind, law.limit, law.alpha, law.beta) == ("swigluoai", 7.0, 1.702, 1.0)
    assert law.source == "config.json model_type = 'gpt_oss'"


def test_mixed_rates_are_a_histogram(tmp_path: Path) -> None:
    rates = {(0, "up_proj"): 8, (1, "up_proj"): 2.5}
    tensors = random_layer(RNG, codebook="mul1", bits=lambda *place: rates.get(place, 1.5))
    config = CONFIG | {"quantization_config": {}}
    (layer,) = inspected(tmp_path, tensors, config).layers
    assert [projection.rates for projection in layer.projections] == [{"1.5": 2}, {"2.5": 1, "8": 1}, {"1.5": 2}]
    assert layer.bits.codes == pytest.approx((1.5 * 4 + 2.5 + 8) / 6)


def test_mtp_layers_come_beside_those_of_the_main_stack(tmp_path: Path) -> None:
    tensors = random_layer(RNG) | random_layer(
        RNG, name=lambda layer, e, word: f"mtp.layers.{layer}.mlp.experts.{e}.{word}"
    )
    report = inspected(tmp_path, tensors)
    assert [(layer.prefix, layer.auxiliary) for layer in report.layers] == [
        ("model.layers.0.mlp.experts", False),
        ("mtp.layers.0.mlp.experts", True),
    ]


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    tensors = random_layer(RNG, name=lambda layer, expert, word: f"net{layer}.e{expert}.{word}")
    report = inspected(tmp_path, tensors)
    assert (report.layers, "no-experts" in codes(report)) == ((), True)
    assert report.bytes.linears == report.bytes.total
    pattern = r"net(?P<layer>\d+)\.e(?P<expert>\d+)\.(?P<projection>\w+)"
    report = inspect_checkpoint(tmp_path / "c", pattern=pattern)
    assert report.layers[0].readable
    assert report.bytes.experts == report.bytes.total
    with pytest.raises(FormatValueError, match="lacks the groups"):
        inspect_checkpoint(tmp_path / "c", pattern="net")


def test_quantised_embeddings_and_tables_are_skipped_with_a_reason(tmp_path: Path) -> None:
    tensors = small(
        **{
            "model.embed_tokens.trellis": np.zeros((512, 49), np.int16),
            "model.embed_tokens.signs": np.ones((1, 256), np.float16),
            "model.ngram.trellis": np.zeros((64, 31), np.int16),
        }
    )
    del tensors["model.embed_tokens.weight"]
    report = inspected(tmp_path, tensors)
    assert not report.has_errors
    reasons = {group.pattern: group.reason for group in report.skipped}
    assert reasons["model.embed_tokens.trellis"] == reasons["model.embed_tokens.signs"] == "quantised-embedding"
    assert reasons["model.ngram.trellis"] == "ngram-table"
    assert report.bytes.embeddings == 512 * 49 * 2 + 512


def test_an_unknown_2d_trellis_is_an_error(tmp_path: Path) -> None:
    report = inspected(tmp_path, small(**{"x.trellis": np.zeros((8, 48), np.int16)}))
    (finding,) = found(report, "broken-linear")
    assert (finding.severity, finding.tensor) == ("error", "x.trellis")
    assert "3-D" in finding.message
    assert report.layers[0].readable


def test_a_legacy_scale_is_noted(tmp_path: Path) -> None:
    tensors = small(**{f"{E0}up_proj.scale": np.float32(1)})
    report = inspected(tmp_path, tensors)
    (finding,) = found(report, "legacy-scale")
    assert (finding.severity, finding.tensor) == ("note", f"{E0}up_proj.scale")
    assert report.skipped[0].reason == "legacy-scale"
    assert report.layers[0].readable


def test_packed_signs_are_counted(tmp_path: Path) -> None:
    report = inspected(tmp_path, random_layer(RNG, packed=True))
    assert (report.transforms.linears_with_vectors, report.transforms.linears_with_packed_signs) == (0, 6)


def test_one_broken_linear_does_not_hide_another(tmp_path: Path) -> None:
    tensors = small(
        **{
            f"{E0}up_proj.suh": np.ones(127, np.float16),
            f"{E1}down_proj.svh": np.ones(128, np.float32),
            "lm_head.trellis": np.zeros((8, 32, 47), np.int16),
        }
    )
    report = inspected(tmp_path, tensors)
    assert {finding.tensor for finding in found(report, "broken-linear")} == {
        f"{E0}up_proj.suh",
        f"{E1}down_proj.svh",
        "lm_head.trellis",
    }
    assert all(finding.file == str(tmp_path / "c/model.safetensors") for finding in found(report, "broken-linear"))
    (layer,) = report.layers
    assert (layer.readable, layer.hidden_size, layer.tensor_parallel) == (False, None, None)
    assert [sum(projection.rates.values()) for projection in layer.projections] == [2, 1, 1]
    assert report.bytes.total == nbytes(tensors, "")


def test_a_thousand_broken_linears_are_counted(tmp_path: Path) -> None:
    tensors = {f"m.{number}.trellis": np.zeros((1, 1, 16), np.int16) for number in range(1000)}
    report = inspected(tmp_path, tensors, None)
    listed = found(report, "broken-linear")
    assert len(listed) == MAX_FINDINGS_PER_CODE + 1
    assert listed[-1].message == f"{1000 - MAX_FINDINGS_PER_CODE} more of this code"


def change(**quantization: Any) -> dict[str, Any]:
    return CONFIG | {"quantization_config": CONFIG["quantization_config"] | quantization}


def storage(module: str, **entry: Any) -> dict[str, Any]:
    return {"tensor_storage": {module: entry}}


def drop(tensors: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if part not in name}


# What is wrong: tensors, config.json, quantization_config.json; then code, severity, words of the message, readable.
Case = tuple[Callable[[], dict[str, Any]], Any, Any, str, str, tuple[str, ...], bool]
CASES: dict[str, Case] = {
    "codebook of the configuration": (
        small, change(codebook="mul1"), None, "stated-otherwise", "error",
        ("config.json says quantization_config.codebook = 'mul1'", "marker tensor mcg says mcg"), False,
    ),
    "a marker that is gone": (
        lambda: drop(small(), "up_proj.mcg"), CONFIG, None, "stated-otherwise", "error",
        ("expected one of mcg, mul1; found none, so 3inst", "codebook = 'mcg'"), False,
    ),
    "rate of the storage table": (
        small, CONFIG, storage(f"{E0}up_proj", bits_per_weight=4), "stated-otherwise", "error",
        ("quantization_config.json", "bits_per_weight = '4'", "K = 3"), False,
    ),
    "multiplier of the storage table": (
        small, CONFIG, storage("lm_head", mcg_multiplier=5), "stated-otherwise", "error",
        ("0x00000005", "0xCBAC1FED"), True,
    ),
    "another method": (
        small, change(quant_method="fp8"), None, "method-conflict", "error",
        ("config.json", "quant_method = 'fp8'", "model.safetensors", ".trellis", "exl3"), False,
    ),
    "the method and no tensor": (
        lambda: {"model.norm.weight": np.zeros(8, np.float16)}, CONFIG, None, "method-conflict", "error",
        ("quant_method = 'exl3'", "no shard holds"), True,
    ),
    "a configuration of the wrong type": (
        small, CONFIG | {"num_experts": "two"}, None, "config-invalid", "error", ("num_experts", "'two'"), False,
    ),
    "a method of the wrong type": (
        small, change(quant_method=3), None, "config-invalid", "error", ("quant_method must be a string",), False,
    ),
    "no configuration": (small, None, None, "config-missing", "warning", ("as stored",), True),
    "an expert less than declared": (
        small, CONFIG | {"num_experts": 3}, None, "broken-layer", "error",
        ("layer 0", "expert 2", "no gate", "2 of 3", "config.json declares 3"), False,
    ),
    "an expert more than declared": (
        small, CONFIG | {"num_experts": 1}, None, "expert-count", "warning", ("says 1 experts", "have 2"), True,
    ),
    "a missing projection": (
        lambda: drop(small(), f"{E1}up_proj"), CONFIG, None, "broken-layer", "error",
        ("layer 0", "expert 1", "no up", "1 of 2"), False,
    ),
    "projections of different sizes": (
        lambda: small(**random_linear(RNG, f"{E1}up_proj", 128, 384)), CONFIG, None, "broken-layer", "error",
        ("expert 1", "gate 128 x 256", "up 128 x 384", "down 256 x 128"), False,
    ),
    "codebooks that differ in a layer": (
        lambda: drop(small(), f"{E1}up_proj.mcg"), CONFIG | {"quantization_config": {}}, None,
        "mixed-codebooks", "error", ("mixes codebooks", "mcg: ", "3inst: "), False,
    ),
    "another hidden size": (
        small, CONFIG | {"hidden_size": 4096}, None, "hidden-size", "warning",
        ("config.json says hidden_size = 4096", "the tensors have 128 hidden channels"), True,
    ),
    "another intermediate size": (
        small, CONFIG | {"moe_intermediate_size": 100}, None, "intermediate-size", "warning",
        ("moe_intermediate_size = 100", "256 intermediate channels"), True,
    ),
    "an unknown activation": (
        small, CONFIG | {"hidden_act": "xielu"}, None, "activation", "warning",
        ("hidden_act = 'xielu'", "not known"), True,
    ),
    "no activation": (
        small, {name: value for name, value in CONFIG.items() if name != "hidden_act"}, None, "activation", "warning",
        ("states no activation",), True,
    ),
    "an activation without a gate": (
        small, CONFIG | {"hidden_act": "relu2"}, None, "activation", "warning", ("takes no gate", "gate, up"), True,
    ),
    "a limit below zero": (
        small, CONFIG | {"swiglu_limit": -1.0}, None, "activation", "error", ("limit -1.0 must be above 0",), True,
    ),
    "rank-sliced experts": (
        lambda: small(**random_linear(RNG, f"{E0}up_proj.rank1", 128, 128)), CONFIG, None, "rank-sliced", "error",
        ("rank-sliced dialect (rank 1)",), False,
    ),
    "a marker under another name": (
        lambda: small(**{f"{E0}up_proj_rank0.mcg": np.int32(1)}), CONFIG, None, "orphan-tensor", "warning",
        ("no trellis has that name",), True,
    ),
    "vectors without codes": (
        lambda: drop(small(), "q_proj.trellis"), CONFIG, None, "orphan-tensor", "warning", ("no trellis",), True,
    ),
    "an expert without quantisation": (
        lambda: small(**{"model.layers.1.mlp.experts.0.up_proj.weight": np.zeros((2, 2), np.float16)}), CONFIG, None,
        "unquantised-expert", "warning", ("without quantisation",), True,
    ),
    "a table that lists too much": (
        small, CONFIG, storage("gone", stored_tensors={"gone.trellis": {"shape": [1]}}), "storage-absent", "warning",
        ("tensor_storage['gone'] lists it", "no shard holds it"), True,
    ),
    "a table with another shape": (
        small, CONFIG, storage("lm_head", stored_tensors={"lm_head.suh": {"shape": [64]}}), "storage-shape", "warning",
        ("says shape [64]", "the shard [128]"), True,
    ),
    "a table without rates": (
        small, CONFIG, storage("lm_head", quant_format="exl3"), "storage-silent", "note",
        ("no bits_per_weight for 9 linears",), True,
    ),
    "another rate of the head": (
        small, change(head_bits=8), None, "head-bits", "warning", ("head_bits = '8'", "the head has K = 6"), True,
    ),
    "an architecture that divides up": (
        small, CONFIG | {"model_type": "laguna"}, None, "up-divisor", "note", ("divides up by 128",), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_disagreement_is_one_finding(tmp_path: Path, case: str) -> None:
    make, config, quantization, code, severity, words, readable = CASES[case]
    report = inspected(tmp_path, make(), config, quantization=quantization)
    listed = found(report, code)
    assert listed, codes(report)
    assert {finding.severity.value for finding in listed} == {severity}
    text = " ".join(f"{finding.message} {finding.file} {finding.tensor}" for finding in listed)
    assert [word for word in words if word not in text] == []
    assert report.has_errors == (severity == "error")
    assert all(layer.readable == readable for layer in report.layers)
    consequences = {"storage-missing", "storage-silent", "no-experts", "activation", "mixed-codebooks"}
    assert codes(report) <= consequences | {code}
    assert InspectReport.model_validate_json(report.to_json()) == report


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_readable_exactly_when_it_can_be_read(tmp_path: Path, case: str) -> None:
    make, config, quantization, *_ = CASES[case]
    report = inspected(tmp_path, make(), config, quantization=quantization)
    checkpoint = open_checkpoint(tmp_path / "c")
    for layer in report.layers:
        try:
            found_layer = find_layer(checkpoint, LayerKey(layer.index, layer.prefix))
            if case != "a limit below zero":  # the activation may be given by the caller
                trellis_from_exl3(found_layer)
            read = True
        except FormatError:
            read = False
        assert layer.readable == read


def test_an_index_that_disagrees_is_a_finding_with_both_counts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", small(), config=CONFIG, index=True)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["ghost"] = index["weight_map"].pop("lm_head.suh")
    write_json(folder / INDEX_NAME, index)
    report = inspect_checkpoint(folder)
    (finding,) = found(report, "index-mismatch")
    assert (finding.severity, finding.file) == ("error", str(folder / INDEX_NAME))
    for part in ("index", "1 tensors are listed", "ghost", "1 are in a shard", "lm_head.suh"):
        assert part in finding.message
    assert report.layers[0].readable
    ignoring = inspect_checkpoint(folder, ignore_index=True)
    assert not ignoring.has_errors
    assert [f.severity.value for f in found(ignoring, "index-ignored")] == ["note"]


def test_a_shard_that_is_gone_is_a_finding(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", small(), config=CONFIG, shards=2, index=True)
    (folder / "model-00001-of-00002.safetensors").unlink()
    report = inspect_checkpoint(folder)
    assert "names 1 shards that are not in the directory" in found(report, "index-mismatch")[0].message
    assert report.shards[0].name == "model-00002-of-00002.safetensors"


def test_a_shard_outside_the_index_is_noted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", small(), config=CONFIG, index=True)
    name = next(iter(small()))
    write_shard(folder / "consolidated.safetensors", {name: np.zeros(2, np.float16)})
    (finding,) = found(inspect_checkpoint(folder), "shard-not-read")
    assert "consolidated.safetensors" in finding.message
    assert finding.severity == "note"


def test_a_tensor_outside_the_index_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", small(), config=CONFIG, index=True)
    write_shard(folder / "consolidated.safetensors", {"x": np.zeros(2, np.float16)})
    (finding,) = found(inspect_checkpoint(folder), "index-mismatch")
    assert finding.numbers == {"listed_only": 0, "stored_only": 1}
    assert "--ignore-index" in finding.message


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ([], "tensor_storage['norm'] must be an object, got list"),
        ({"stored_tensors": 3}, "tensor_storage['norm'].stored_tensors must be an object, got int"),
        ({"stored_tensors": {"norm.weight": [2]}}, "has no object with a list shape for it, got [2]"),
        ({"stored_tensors": {"norm.weight": {"shape": "2"}}}, "has no object with a list shape for it"),
        ({"stored_tensors": {"norm.weight": {}}}, None),
        ({}, None),
    ],
)
def test_malformed_storage_is_a_finding(tmp_path: Path, entry: Any, text: str | None) -> None:
    tensors = small() | {"norm.weight": np.zeros(2, np.float16)}
    folder = write_checkpoint(tmp_path / "c", tensors, config=CONFIG, quantization={"tensor_storage": {"norm": entry}})
    findings = found(inspect_checkpoint(folder), "storage-invalid")
    assert len(findings) == (text is not None)
    for finding in findings:
        assert text is not None
        assert text in finding.message
        assert finding.severity == "error"
        assert finding.file == str(folder / "quantization_config.json")


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError):
        inspect_checkpoint(tmp_path / "none")
    (tmp_path / "c").mkdir()
    with pytest.raises(FormatValueError, match=r"no \*\.safetensors file"):
        inspect_checkpoint(tmp_path / "c")
    write_bytes(tmp_path / "c/model.safetensors", b"{")
    with pytest.raises(FormatValueError, match="too short"):
        inspect_checkpoint(tmp_path / "c")


def test_names_of_any_kind_are_carried(tmp_path: Path) -> None:
    odd = ["\x1b[31m.weight", "a..b.weight", "é.\u202eweight", "x" * 5000, "", ".", "[bold]"]
    report = inspected(tmp_path, small(**{name: np.zeros(2, np.float16) for name in odd}))
    assert {group.example for group in report.skipped} >= set(odd)
    assert InspectReport.model_validate_json(report.to_json()) == report


@pytest.mark.parametrize("method", ["gptq", "exl2"])
def test_a_stated_method_can_be_ignored(tmp_path: Path, method: str) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": method}}
    report = inspected(tmp_path, small(), config)
    (finding,) = found(report, "method-conflict")
    assert not report.layers[0].readable
    report = inspect_checkpoint(tmp_path / "c", ignore_method=True)
    assert not report.has_errors
    assert report.layers[0].readable
    (note,) = found(report, "method-ignored")
    assert note.message == f"{finding.message}; the tensors are trusted, as asked"
    assert (note.file, note.tensor) == (finding.file, finding.tensor)
    assert found(inspect_checkpoint(write_checkpoint(tmp_path / "d", small(), config=CONFIG), ignore_method=True),
                 "method-ignored") == []  # fmt: skip
