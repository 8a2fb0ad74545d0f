"""Holds presets to legal layers, and to the sizes of their models."""

from __future__ import annotations

import pytest

from trellis_format.errors import FormatValueError
from trellis_moe.bench.presets import PRESETS, TINY, get_preset
from trellis_moe.errors import MoeValueError

EXPERT_BYTES = {  # of one expert's codes, unsliced
    "qwen3-30b-a3b:mul1:3": 1_769_472,
    "qwen3-30b-a3b:mcg:4": 2_359_296,
    "glm-4.5-air:mul1:3": 6_488_064,
    "deepseek-v3:mcg:3": 16_515_072,
}


@pytest.mark.parametrize("key", PRESETS)
def test_presets_are_legal_layers_of_their_sizes(key: str) -> None:
    preset = PRESETS[key]
    source = preset.source()
    geometry = source.geometry
    assert (geometry.num_experts, geometry.hidden_size) == (preset.experts, preset.hidden)
    assert source.extent.width == preset.intermediate
    assert preset.weights_per_expert * float(preset.k) / 8 * preset.experts == source.code_bytes()
    assert get_preset(key) == preset


@pytest.mark.parametrize(("key", "nbytes"), EXPERT_BYTES.items())
def test_experts_have_the_bytes_of_their_models(key: str, nbytes: int) -> None:
    assert PRESETS[key].source().code_bytes() == nbytes * PRESETS[key].experts


def test_a_rank_of_kimi_has_the_bytes_of_its_share() -> None:
    assert PRESETS["kimi-k3-tp9:mcg:2"].source().code_bytes() == 924_844_032


def test_a_model_alone_is_its_first_rate_and_any_other_can_be_given() -> None:
    assert get_preset("qwen3-30b-a3b") == PRESETS["qwen3-30b-a3b:mul1:3"]
    other = get_preset("qwen3-30b-a3b:mul1:2.5")
    assert (other.codebook, other.k, other.hidden) == ("mul1", "2.5", 2048)
    assert get_preset("tiny") == TINY


@pytest.mark.parametrize("text", ["gpt", "tiny:mcg", "tiny:mcg:3:4", ""])
def test_unknown_layers_are_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(MoeValueError, match=r"glm-4\.5-air"):
        get_preset(text)


@pytest.mark.parametrize("text", ["tiny:hyb:3", "tiny:mcg:2.5", "tiny:mcg:9"])
def test_codes_that_are_not_legal_are_refused(text: str) -> None:
    with pytest.raises(FormatValueError):
        get_preset(text)
