"""Holds the report to a schema that a machine can rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from exl3_files import write_checkpoint
from trellis_format.inspect import inspect_checkpoint
from trellis_format.report import SCHEMA, SCHEMA_VERSION, Finding, InspectReport, Severity

# Every key of the JSON with its kind: what schema_version 1 promises.
SHAPE_V1: dict[str, Any] = {
    "schema": str,
    "schema_version": int,
    "tool_version": str,
    "path": str,
    "container": str,
    "shards": {"name": str, "bytes": int, "tensors": int},
    "model": {
        "model_type": str,
        "architectures": str,
        "hidden_size": int,
        "num_experts": int,
        "top_k": int,
        "activation": {"kind": str, "limit": float, "alpha": float, "beta": float, "source": str},
    },
    "stated": {"file": str, "field": str, "value": str},
    "layers": {
        "index": int,
        "prefix": str,
        "auxiliary": bool,
        "readable": bool,
        "experts": int,
        "hidden_size": int,
        "padded_hidden_size": int,
        "intermediate_size": int,
        "padded_intermediate_size": int,
        "projections": {
            "projection": str,
            "shapes": "counts",
            "rates": "counts",
            "codebooks": "counts",
            "biased": int,
            "bytes": int,
        },
        "bits": {"linears": int, "weights": int, "codes": float, "total": float},
        "bytes": int,
        "up_divisor": float,
        "tensor_parallel": {"blocks": int, "even": int, "largest": int, "alignment_slots": int, "barriers": int},
        "pair_kinds": str,
        "file": str,
        "sha256": str,
    },
    "bits_per_weight": {
        part: {"linears": int, "weights": int, "codes": float, "total": float}
        for part in ("model", "experts", "shared_experts", "linears", "head")
    },
    "bytes": dict.fromkeys(("experts", "shared_experts", "linears", "head", "embeddings", "others", "total"), int),
    "transforms": {
        "kind": str,
        "block_size": int,
        "linears_with_vectors": int,
        "linears_with_packed_signs": int,
        "expert": str,
    },
    "skipped": {
        "reason": str,
        "explanation": str,
        "pattern": str,
        "dtypes": str,
        "tensors": int,
        "bytes": int,
        "example": str,
    },
    "findings": {"code": str, "severity": str, "message": str, "file": str, "tensor": str, "numbers": "numbers"},
}


def check_shape(value: Any, shape: Any, place: str = "report") -> None:
    if isinstance(value, list):
        for number, item in enumerate(value):
            check_shape(item, shape, f"{place}[{number}]")
    elif value is None:
        return
    elif shape == "numbers":
        assert all(type(number) in (int, float) for number in value.values()), place
    elif shape == "counts":
        assert all(isinstance(count, int) and count > 0 for count in value.values()), place
    elif isinstance(shape, dict):
        assert list(value) == list(shape), place
        for key, part in shape.items():
            check_shape(value[key], part, f"{place}.{key}")
    else:
        assert type(value) is shape, place


def test_the_json_has_the_shape_of_its_version(checkpoint_path: Path) -> None:
    value = json.loads(inspect_checkpoint(checkpoint_path).to_json())
    assert (value["schema"], value["schema_version"]) == (SCHEMA, SCHEMA_VERSION) == ("trellis-format/inspect", 1)
    check_shape(value, SHAPE_V1)


def test_findings_have_the_shape_too(tmp_path: Path) -> None:
    broken = {"a.trellis": np.zeros((1, 1, 16), np.int16), "b.suh": np.zeros(1, np.float16)}
    value = json.loads(inspect_checkpoint(write_checkpoint(tmp_path / "c", broken)).to_json())
    assert {finding["severity"] for finding in value["findings"]} == {"error", "warning", "note"}
    check_shape(value, SHAPE_V1)


def test_the_json_is_read_back(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    assert InspectReport.model_validate_json(report.to_json()) == report


def test_the_exported_schema_has_every_key() -> None:
    schema = InspectReport.json_schema()
    assert list(schema["properties"]) == list(SHAPE_V1)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["schema"]["const"] == SCHEMA
    assert schema["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert json.loads(json.dumps(schema)) == schema


def test_unknown_keys_are_refused_and_values_are_fixed(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    value = json.loads(report.to_json())
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        InspectReport.model_validate(value | {"extra": 1})
    for key, wrong in (("schema", "other/schema"), ("schema_version", 2)):
        with pytest.raises(ValidationError, match=key):
            InspectReport.model_validate(value | {key: wrong})
    with pytest.raises(ValidationError, match="frozen"):
        report.path = "elsewhere"  # type: ignore[misc]


def test_errors_alone_make_a_report_bad(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    for severity in Severity:
        finding = Finding(code="x", severity=severity, message="m")
        changed = report.model_copy(update={"findings": (finding,)})
        assert changed.has_errors == (severity is Severity.ERROR)
    assert not report.has_errors


def test_json_is_ascii_whatever_the_names(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    nasty = "\x1b[31mred\x9b\u202e\u2028\U0001f600"
    text = report.model_copy(update={"path": nasty}).to_json()
    assert text.isascii()
    assert "\x1b" not in text
    assert json.loads(text)["path"] == nasty
