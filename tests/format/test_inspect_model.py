"""Holds what a report says about configurations to what they state and to the sizes of a layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trellis_format.activations import Activation
from trellis_format.findings import Findings
from trellis_format.inspect_model import compare_sizes, read_model, summarise_model
from trellis_format.model_config import ModelConfig
from trellis_format.source import ExpertGeometry, Projection

FILE = Path("folder/config.json")
GATED = tuple(Projection)
PLAIN = (Projection.UP, Projection.DOWN)
GEOMETRY = ExpertGeometry(
    num_experts=4, hidden_size=256, intermediate_size=384, padded_hidden_size=256, padded_intermediate_size=384
)


def codes(findings: Findings) -> list[str]:
    return [finding.code for finding in findings.collected()]


@pytest.mark.parametrize(
    ("config", "expected"), [(None, ["config-missing"]), ({"hidden_size": "x"}, ["config-invalid"]), ({}, [])]
)
def test_configurations_are_read_or_a_finding(config: Any, expected: list[str]) -> None:
    findings = Findings()
    read = read_model(config, FILE, findings)
    assert codes(findings) == expected
    assert (read is None) == (expected == ["config-invalid"])
    assert {finding.file for finding in findings.collected()} <= {str(FILE)}


@pytest.mark.parametrize(
    ("config", "projections", "kind", "words"),
    [
        ({"hidden_act": "silu"}, GATED, "silu", ""),
        (
            {"hidden_act": "silu"},
            PLAIN,
            "silu",
            "hidden_act = 'silu' takes a gate, the experts have down, up",
        ),
        ({"hidden_act": "relu2"}, GATED, "relu2", "takes no gate, the experts have down, gate, up"),
        ({"hidden_act": "mish"}, GATED, None, "hidden_act = 'mish', which is not known; a caller must name it"),
        ({}, GATED, None, "config.json states no activation of the experts; a caller must name it"),
        ({}, (), None, ""),
        ({"hidden_act": "silu", "swiglu_limit": -1.0}, GATED, None, "limit"),
    ],
)
def test_the_activation_is_that_of_the_configuration(
    config: dict[str, Any], projections: tuple[Projection, ...], kind: str | None, words: str
) -> None:
    findings = Findings()
    summary = summarise_model(ModelConfig(**config), FILE, projections, findings)
    assert (None if summary.activation is None else summary.activation.kind) == kind
    messages = [finding.message for finding in findings.collected()]
    assert len(messages) == bool(words)
    assert all(words in message for message in messages)


@pytest.mark.parametrize("limit", [math.inf, 7.0])
def test_a_manifest_may_state_it_instead(limit: float) -> None:
    findings = Findings()
    stated = (Activation("silu", limit=limit), "manifest")
    summary = summarise_model(ModelConfig(hidden_act="mish"), FILE, GATED, findings, stated=stated)
    assert summary.activation is not None
    assert (summary.activation.source, summary.activation.limit) == ("manifest", None if math.isinf(limit) else 7.0)
    assert codes(findings) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 256, "moe_intermediate_size": 300, "num_experts": 4}, []),
        ({"hidden_size": 129, "moe_intermediate_size": 257}, []),
        ({"hidden_size": 257}, ["hidden-size"]),
        ({"moe_intermediate_size": 256}, ["intermediate-size"]),
        ({"num_experts": 3}, ["expert-count"]),
        ({"num_experts": 5}, []),
        ({"num_experts": 0}, ["expert-count"]),
        ({"num_experts_per_tok": 0, "moe_intermediate_size": 0}, ["expert-count", "expert-count"]),
    ],
)
def test_sizes_are_compared_after_padding(config: dict[str, Any], expected: list[str]) -> None:
    findings = Findings()
    compare_sizes(FILE, 3, "layers.3.experts", GEOMETRY, ModelConfig(**config), findings)
    assert codes(findings) == expected
    for finding in findings.collected():
        assert finding.message.startswith("layer 3: config.json says ")
        assert finding.tensor == "layers.3.experts"
