"""Holds the recognition of expert names to the names of real architectures."""

from __future__ import annotations

import time

import pytest

from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.exl3.names import DEFAULT_PATTERN, PROJECTION_NAMES, ExpertName, compile_pattern, match_expert
from trellis_format.source import Projection

DEFAULT = compile_pattern(DEFAULT_PATTERN)


@pytest.mark.parametrize(
    ("prefix", "layer", "expert", "word", "projection"),
    [
        ("model.layers.3.mlp.experts", 3, 17, "gate_proj", "gate"),
        ("model.layers.3.mlp.experts", 3, 17, "up_proj", "up"),
        ("model.language_model.layers.0.mlp.experts", 0, 0, "down_proj", "down"),
        ("language_model.model.layers.1.feed_forward.experts", 1, 5, "gate_proj", "gate"),
        ("model.layers.61.block_sparse_moe.experts", 61, 7, "w1", "gate"),
        ("model.layers.61.block_sparse_moe.experts", 61, 7, "w2", "down"),
        ("model.layers.61.block_sparse_moe.experts", 61, 7, "w3", "up"),
        ("layers.2.ffn.experts", 2, 255, "w3", "up"),
        ("backbone.layers.5.mixer.experts", 5, 1, "up_proj", "up"),
        ("mtp.layers.0.mlp.experts", 0, 2, "down_proj", "down"),
        ("model.mtp.layers.0.transformer_layer.mlp.experts", 0, 2, "w1", "gate"),
    ],
)
def test_names_of_real_architectures(prefix: str, layer: int, expert: int, word: str, projection: str) -> None:
    found = match_expert(f"{prefix}.{expert}.{word}", DEFAULT)
    assert found == ExpertName(prefix, layer, expert, Projection(projection))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.gate_proj",
        "model.layers.3.mlp.shared_experts.gate_proj",
        "model.layers.3.mlp.shared_expert.up_proj",
        "model.layers.3.mlp.experts.gate_proj",
        "model.layers.3.mlp.experts.1.gate_up_proj",
        "model.layers.3.mlp.experts.1.gate_proj.slice.0",
        "model.layers.3.mlp.experts.1.w2_rank0",
        "model.layers.x.mlp.experts.1.w2",
        "model.layers.3.mlp..experts.1.w2",
        "model.layers.3.mlp.experts.-1.w2",
        "model.layers.3.mlp.experts.1234567890.w2",
        "experts.1.w2",
        "lm_head",
        "",
        "x." * 600 + "layers.0.mlp.experts.0.w1",
    ],
)
def test_other_names_are_no_experts(name: str) -> None:
    assert match_expert(name, DEFAULT) is None


def test_every_word_has_a_projection() -> None:
    for word, projection in PROJECTION_NAMES.items():
        found = match_expert(f"m.layers.0.mlp.experts.0.{word}", DEFAULT)
        assert found is not None
        assert found.projection is projection
    assert set(PROJECTION_NAMES.values()) == set(Projection)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.rank1", 1),
        ("m.layers.9.ffn.experts.0.w2.rank12", 12),
        ("a.experts.0.w1.rank3.x", 3),
    ],
)
def test_the_rank_sliced_dialect_is_named(name: str, rank: int) -> None:
    with pytest.raises(FormatUnsupportedError, match=rf"rank-sliced dialect \(rank {rank}\)") as caught:
        match_expert(name, DEFAULT)
    assert caught.value.tensor == name


def test_a_hostile_name_takes_bounded_time() -> None:
    began = time.process_time()
    for name in ("layers.1." * 200_000, "layers.1." * 110 + "x", "a." * 500, "layers.1.experts." * 60):
        assert match_expert(name, DEFAULT) is None
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(", "is not a regular expression"),
        (r"(?P<layer>\d+)", "lacks the groups expert, projection"),
        (r"(?P<layer>\d+)(?P<expert>\d+)", "lacks the groups projection"),
        ("", "lacks the groups expert, layer, projection"),
    ],
)
def test_a_pattern_must_be_usable(pattern: str, text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        compile_pattern(pattern)


def test_a_pattern_of_ones_own() -> None:
    own = compile_pattern(r"net\.(?P<layer>\d+)\.expert_(?P<expert>\d+)\.(?P<projection>\w+)")
    assert match_expert("net.4.expert_2.up", own) == ExpertName("net.4.expert_", 4, 2, Projection.UP)
    assert match_expert("net.4.expert_2.w1", own) == ExpertName("net.4.expert_", 4, 2, Projection.GATE)
    assert match_expert("net.4.expert_2.up.x", own) is None
    with pytest.raises(FormatValueError, match="projection 'middle' is not known; known: gate_proj"):
        match_expert("net.4.expert_2.middle", own)


def test_an_optional_group_that_is_absent_is_no_match() -> None:
    own = compile_pattern(r"a(?P<layer>\d+)(\.(?P<expert>\d+))?\.(?P<projection>up)")
    assert match_expert("a1.2.up", own) == ExpertName("a1", 1, 2, Projection.UP)
    assert match_expert("a1.up", own) is None


def test_a_pattern_with_its_own_prefix_and_odd_indices() -> None:
    own = compile_pattern(r"(?P<prefix>a(?P<layer>[^.]*))\.(?P<expert>[^.]*)\.(?P<projection>\w+)")
    assert match_expert("a7.3.down", own) == ExpertName("a7", 7, 3, Projection.DOWN)
    assert match_expert("ax.3.down", own) is None
    assert match_expert("a7.x.down", own) is None
