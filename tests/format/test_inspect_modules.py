"""Holds the sorting of modules: every tensor is counted once, and what breaks a rule is set aside with a finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from exl3_files import random_layer, random_linear, write_checkpoint
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3.declared import DeclaredQuantization
from trellis_format.exl3.layers import LayerKey
from trellis_format.exl3.names import DEFAULT_PATTERN, compile_pattern
from trellis_format.findings import Findings
from trellis_format.inspect_modules import Survey, sort_modules
from trellis_format.survey import SkipReason, TensorClass

RNG = np.random.default_rng(0)


def sorted_modules(folder: Path, tensors: dict[str, Any]) -> tuple[Survey, Findings]:
    survey, findings = Survey(), Findings()
    with open_checkpoint(write_checkpoint(folder / "c", tensors)) as checkpoint:
        sort_modules(checkpoint, compile_pattern(DEFAULT_PATTERN), DeclaredQuantization(), survey, findings)
        assert checkpoint.bytes_read == 0
    return survey, findings


def test_every_byte_is_counted_once(tmp_path: Path) -> None:
    tensors = random_layer(RNG) | random_linear(RNG, "lm_head", 128, 256) | {"norm.weight": np.ones(7, np.float16)}
    survey, findings = sorted_modules(tmp_path, tensors)
    assert findings.collected() == ()
    assert sum(size for _, size in survey.sizes) == sum(np.asarray(tensor).nbytes for tensor in tensors.values())
    assert len(survey.linears) == 7
    assert survey.kinds["lm_head"] is TensorClass.HEAD
    assert len(survey.experts[LayerKey(0, "model.layers.0.mlp.experts")]) == 6
    assert {name: reason for name, (reason, _) in survey.skipped.items()} == {"norm.weight": SkipReason.UNQUANTISED}


def test_broken_linears_stay_with_their_layer(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.1.up_proj"
    survey, findings = sorted_modules(tmp_path, random_layer(RNG) | {f"{name}.suh": np.ones(3, np.float16)})
    assert name not in survey.linears
    assert name in survey.experts[LayerKey(0, "model.layers.0.mlp.experts")]
    assert [finding.code for finding in findings.collected()] == ["broken-linear"]
    assert not survey.refused


def test_slices_of_ranks_refuse_the_checkpoint(tmp_path: Path) -> None:
    tensors = random_linear(RNG, "model.layers.0.mlp.experts.0.up_proj.rank1", 128, 128)
    survey, findings = sorted_modules(tmp_path, tensors)
    assert survey.refused
    assert [finding.code for finding in findings.collected()] == ["rank-sliced"]
    assert {reason for reason, _ in survey.skipped.values()} == {SkipReason.RANK_SLICED}
