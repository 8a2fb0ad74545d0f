"""Holds the reading of `config.json` to what real files look like."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trellis_format.activations import Activation
from trellis_format.errors import FormatValueError
from trellis_format.files.strict_json import read_json
from trellis_format.model_config import ModelConfig, parse_model_config


def parse(config: dict[str, Any] | None) -> ModelConfig:
    return parse_model_config(config, file="folder/config.json")


def test_no_configuration_says_nothing() -> None:
    config = parse(None)
    assert (config.expert_count(), config.top_k(), config.activation(), config.activation_key()) == (None,) * 4
    assert config.expert_widths() == config.hidden_sizes() == {}
    assert config.up_divisor(0) == 1.0


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_go_by_several_names(key: str) -> None:
    assert parse({key: 64}).expert_count() == 64


def test_the_most_specific_width_comes_first() -> None:
    config = parse({"intermediate_size": 6144, "moe_intermediate_size": 768, "hidden_size": 2048})
    assert config.expert_widths() == {"moe_intermediate_size": 768, "intermediate_size": 6144}
    assert parse({"hidden_size": 7168, "moe_latent_size": 1024}).hidden_sizes() == {
        "moe_latent_size": 1024,
        "hidden_size": 7168,
    }


def test_lists_give_their_first_value() -> None:
    config = parse({"moe_num_experts": [64, 64], "num_experts_per_tok": [6, 6], "intermediate_size": [512, 1024]})
    assert (config.expert_count(), config.top_k()) == (64, 6)
    assert config.expert_widths() == {"intermediate_size": 512}
    assert parse({"moe_num_experts": []}).expert_count() is None


def test_zero_and_null_say_nothing() -> None:
    config = parse({"num_experts": 0, "num_local_experts": None, "n_routed_experts": 8, "architectures": None})
    assert config.expert_count() == 8
    assert config.architectures is None
    assert config.zeros() == ("num_experts",)
    assert parse({"num_experts": 8, "moe_latent_size": 0}).zeros() == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -128),
        ("intermediate_size", 0),
        ("moe_latent_size", -1),
        ("moe_intermediate_size", -1),
        ("num_experts", -1),
        ("num_local_experts", -8),
        ("n_routed_experts", -1),
        ("num_experts_per_tok", -1),
        ("moe_num_experts", [64, -1]),
    ],
)
def test_sizes_are_positive(key: str, value: Any) -> None:
    with pytest.raises(FormatValueError, match=rf"config\.json: {key}.*should be greater than"):
        parse({key: value})


def test_text_config_wins_over_the_top() -> None:
    config = parse(
        {
            "model_type": "qwen3_vl_moe",
            "hidden_size": 1152,
            "vision_config": {"hidden_size": 5},
            "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "num_experts": 128},
        }
    )
    assert config.model_type == "qwen3_vl_moe_text"
    assert config.hidden_sizes() == {"hidden_size": 2048}
    assert config.expert_count() == 128
    assert parse({"hidden_size": 64, "text_config": "none"}).hidden_size == 64


def test_unknown_keys_are_left_alone() -> None:
    assert parse({"rope_scaling": {"type": "yarn"}, "num_experts": 4}).expert_count() == 4


@pytest.mark.parametrize(
    ("config", "kind", "key"),
    [
        ({"hidden_act": "silu"}, "silu", "hidden_act"),
        ({"hidden_act": "swish"}, "silu", "hidden_act"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh", "hidden_act"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh", "hidden_activation"),
        ({"hidden_act": "situ"}, "situ", "hidden_act"),
        ({"mlp_hidden_act": "relu2", "hidden_act": "silu"}, "relu2", "mlp_hidden_act"),
    ],
)
def test_activations_go_by_several_names(config: dict[str, Any], kind: str, key: str) -> None:
    assert parse(config).activation() == Activation(kind)
    assert parse(config).activation_key() == key


def test_an_unknown_activation_is_none_but_has_a_key() -> None:
    config = parse({"hidden_act": "xielu"})
    assert config.activation() is None
    assert config.activation_key() == "hidden_act"


def test_gpt_oss_has_its_own_law_whatever_hidden_act_says() -> None:
    config = parse({"model_type": "gpt_oss", "hidden_act": "silu"})
    assert config.activation() == Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)
    assert config.activation_key() == "model_type"
    limited = parse({"model_type": "gpt_oss", "swiglu_limit": 5}).activation()
    assert limited is not None
    assert limited.limit == 5.0


def test_a_stated_limit_clamps_silu() -> None:
    assert parse({"hidden_act": "silu", "swiglu_limit": 10.0}).activation() == Activation("silu", limit=10.0)
    for nothing in (None, 0, [7.0, None]):
        law = parse({"hidden_act": "silu", "swiglu_limit": nothing}).activation()
        assert law is not None
        assert math.isinf(law.limit)
    with pytest.raises(FormatValueError, match="must be above 0"):
        parse({"hidden_act": "silu", "swiglu_limit": -1.0}).activation()


@pytest.mark.parametrize(
    ("config", "layer", "divisor"),
    [
        ({"model_type": "laguna"}, 3, 128.0),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, 0, 128.0),
        ({"architectures": ["MiMoV2ForCausalLM"]}, 47, 128.0),
        ({"architectures": ["MiMoV2ForCausalLM"]}, 46, 1.0),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, 47, 1.0),
    ],
)
def test_architectures_that_divide_up(config: dict[str, Any], layer: int, divisor: float) -> None:
    assert parse(config).up_divisor(layer) == divisor


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"num_experts": "8"}, "num_experts"),
        ({"num_experts": 8.0}, "num_experts"),
        ({"num_experts": True}, "num_experts"),
        ({"hidden_size": [1, 2]}, "hidden_size"),
        ({"moe_intermediate_size": ["a"]}, "moe_intermediate_size"),
        ({"hidden_act": {"name": "silu"}}, "hidden_act"),
        ({"model_type": 7}, "model_type"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures"),
        ({"swiglu_limit": "seven"}, "swiglu_limit"),
        ({"text_config": {"hidden_size": "x" * 1000}}, "hidden_size"),
    ],
)
def test_a_key_of_the_wrong_type_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(FormatValueError, match=rf"^folder/config\.json: {key}") as caught:
        parse(config)
    assert caught.value.file == "folder/config.json"
    assert len(str(caught.value)) < 300


def test_real_configurations_state_what_their_layers_need(checkpoint_path: Path) -> None:
    config = parse(read_json(checkpoint_path / "config.json"))
    assert config.activation() is not None
    assert config.top_k() == 2
    assert (config.expert_count() or 0) >= 2
    assert config.hidden_sizes()
    assert config.expert_widths()
