"""Holds the checks of tensor data to the smallest file that breaks each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_linear, write_shard
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.findings import Findings
from trellis_format.report import Finding, Severity
from trellis_format.source import ExpertGeometry, Projection
from trellis_format.validate_data import check_linears, data_bytes, true_outputs


def tensors_of(**options: Any) -> dict[str, Any]:
    return dict(random_linear(np.random.default_rng(0), "m", 128, 256, **options))


def described(folder: Path, tensors: dict[str, Any]) -> Exl3Linear:
    reader = ShardReader(read_header(write_shard(folder / "x.safetensors", tensors)))
    arrays = {name.rpartition(".")[2]: FileArray(reader, entry) for name, entry in reader.header.entries.items()}
    return describe_linear("m", arrays)


def found(linear: Exl3Linear, outputs: int | None = None) -> list[Finding]:
    findings = Findings()
    check_linears([linear], {} if outputs is None else {"m": outputs}, findings)
    return list(findings.collected())


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
@pytest.mark.parametrize("bias", [None, np.float16, np.float32])
@pytest.mark.parametrize("packed", [False, True])
def test_a_sound_linear_has_no_finding(tmp_path: Path, codebook: str, bias: Any, packed: bool) -> None:
    assert found(described(tmp_path, tensors_of(codebook=codebook, bias=bias, packed=packed)), 256) == []


@pytest.mark.parametrize("suffix", ["suh", "svh", "bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path: Path, suffix: str, value: float) -> None:
    tensors = tensors_of(bias=np.float16)
    tensors[f"m.{suffix}"][[7, 90]] = value
    (finding,) = found(described(tmp_path, tensors))
    assert finding.code == ("bias-not-finite" if suffix == "bias" else "scale-not-finite")
    assert (finding.severity, finding.tensor) == (Severity.ERROR, f"m.{suffix}")
    assert f"2 of {tensors[f'm.{suffix}'].size} are not, first at index 7 ({value})" in finding.message
    assert finding.numbers == {"index": 7, "count": 2, "length": tensors[f"m.{suffix}"].size}


def test_a_bias_beyond_float16_is_not_finite_as_it_is_taken(tmp_path: Path) -> None:
    tensors = tensors_of(bias=np.float32)
    tensors["m.bias"][3] = 1e6
    (finding,) = found(described(tmp_path, tensors))
    assert (finding.code, finding.numbers["index"]) == ("bias-not-finite", 3)


@pytest.mark.parametrize("suffix", ["svh", "bias"])
def test_padding_must_be_zero(tmp_path: Path, suffix: str) -> None:
    tensors = tensors_of(bias=np.float16)
    for part in ("svh", "bias"):
        tensors[f"m.{part}"][200:] = 0
    tensors[f"m.{suffix}"][201] = 0.5
    (finding,) = found(described(tmp_path, tensors), outputs=200)
    assert (finding.code, finding.tensor) == ("padding-not-zero", f"m.{suffix}")
    assert finding.numbers == {"index": 201, "count": 1, "true": 200, "stored": 256}
    assert found(described(tmp_path, tensors)) == []  # where the true size is not known


def test_a_foreign_multiplier(tmp_path: Path) -> None:
    tensors = tensors_of(codebook="mul1")
    tensors["m.mul1"] = np.array(5, np.int32)
    (finding,) = found(described(tmp_path, tensors))
    assert (finding.code, finding.tensor) == ("marker-value", "m.mul1")
    assert finding.numbers == {"observed": 5, "expected": 0x83DCD12D}
    assert "0x00000005" in finding.message
    assert "0x83DCD12D" in finding.message


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    linear = described(tmp_path, tensors_of())
    path = tmp_path / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    findings = found(linear)
    assert {finding.code for finding in findings} == {"unreadable"}
    assert len(findings) == len([suffix for suffix in linear.tensors if suffix != "trellis"])


def test_codes_are_not_read_and_each_tensor_is_told(tmp_path: Path) -> None:
    linear, told = described(tmp_path, tensors_of(bias=np.float16)), []
    check_linears([linear], {}, Findings(), on_bytes=told.append)
    assert sum(told) == data_bytes([linear]) == linear.nbytes - linear.trellis.nbytes
    assert len(told) == 4


def test_true_outputs_of_each_projection() -> None:
    geometry = ExpertGeometry(
        num_experts=1, hidden_size=100, intermediate_size=200, padded_hidden_size=128, padded_intermediate_size=256
    )
    assert [true_outputs(geometry, projection) for projection in Projection] == [200, 200, 100]
