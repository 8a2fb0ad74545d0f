"""Holds the way from checkpoints' names to modules to transformers' own tables."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from exl3_models import MODELS
from trellis_moe.integrations.transformers.names import ModelNames

EXPERTS = {  # model type: where its experts are in checkpoints, the word of a linear, the module
    "qwen3_moe": ("model.layers.1.mlp.experts", "gate_proj", "model.layers.1.mlp.experts"),
    "mixtral": ("model.layers.1.block_sparse_moe.experts", "w3", "model.layers.1.mlp.experts"),
    "minimax_m2": ("model.layers.0.block_sparse_moe.experts", "w2", "model.layers.0.mlp.experts"),
    "deepseek_v3": ("model.layers.1.mlp.experts", "down_proj", "model.layers.1.mlp.experts"),
    "gpt_oss": ("model.layers.0.mlp.experts", "up_proj", "model.layers.0.mlp.experts"),
}


def names(model_type: str) -> ModelNames:
    config = AutoConfig.for_model(model_type, **{"num_hidden_layers": 2, "vocab_size": 64, **MODELS[model_type]})
    with torch.device("meta"):
        return ModelNames(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_are_found_under_their_first_names(model_type: str) -> None:
    prefix, word, path = EXPERTS[model_type]
    found = names(model_type).find_experts(prefix, f"{prefix}.3.{word}")
    assert found is not None
    assert (found[0], type(found[1]).__name__.endswith("Experts")) == (path, True)


@pytest.mark.parametrize("model_type", EXPERTS)
def test_linears_are_found(model_type: str) -> None:
    of_model = names(model_type)
    for name in ("model.layers.0.self_attn.o_proj", "lm_head"):
        found = of_model.find(name)
        assert found is not None
        assert (found[0], type(found[1])) == (name, torch.nn.Linear)


def test_what_the_model_lacks_is_none() -> None:
    of_model = names("deepseek_v3")
    assert of_model.find("model.layers.2.self_attn.o_proj") is None
    prefix = "model.layers.2.mlp.experts"
    assert of_model.find_experts(prefix, f"{prefix}.0.up_proj") is None
