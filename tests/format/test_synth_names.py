"""Holds the names of synthetic models to what the reader of expert names makes of them."""

from __future__ import annotations

import pytest

from trellis_format.errors import FormatValueError
from trellis_format.exl3.names import DEFAULT_PATTERN, compile_pattern, match_expert
from trellis_format.model_config import parse_model_config
from trellis_format.source import Projection
from trellis_format.synth_names import NAMINGS, get_naming

PATTERN = compile_pattern(DEFAULT_PATTERN)
SIZES = {"hidden": 640, "intermediate": 384, "experts": 5, "layers": 7, "top_k": 3}


@pytest.mark.parametrize("name", NAMINGS)
def test_the_reader_finds_experts_by_their_names(name: str) -> None:
    naming = NAMINGS[name]
    for projection in naming.words:
        found = match_expert(naming.expert_path(11, 42, projection), PATTERN)
        assert found is not None
        assert (found.layer, found.expert, found.projection) == (11, 42, projection)
        assert found.prefix == f"{naming.block_path(11)}.experts"


@pytest.mark.parametrize("name", NAMINGS)
def test_the_reader_finds_sizes_and_a_law_in_the_configuration(name: str) -> None:
    naming = NAMINGS[name]
    config = parse_model_config(naming.config(**SIZES), file="config.json")
    assert config.expert_count() == 5
    assert next(iter(config.expert_widths().values())) == 384
    assert next(iter(config.hidden_sizes().values())) == 640
    assert config.top_k() == 3
    activation = config.activation()
    assert activation is not None
    assert activation.gated == (Projection.GATE in naming.words)
    assert config.model_type == naming.model_type


@pytest.mark.parametrize("name", NAMINGS)
def test_router_and_shared_experts_are_no_routed_experts(name: str) -> None:
    naming = NAMINGS[name]
    for part in (naming.router, naming.shared):
        for word in naming.words.values():
            assert match_expert(f"{naming.block_path(0)}.{part}.{word}", PATTERN) is None


def test_unknown_namings_are_refused_with_the_known_ones() -> None:
    assert get_naming("mixtral") is NAMINGS["mixtral"]
    with pytest.raises(FormatValueError, match="unknown naming 'gpt2'; known: qwen2, qwen3"):
        get_naming("gpt2")
