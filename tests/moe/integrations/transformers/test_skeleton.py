"""Holds the placing of a checkpoint's linears to the model's modules, and each misfit to a refusal with its numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from exl3_models import MODELS
from trellis_format.checkpoint import open_checkpoint
from trellis_moe.errors import MoeUnsupportedError, MoeValueError
from trellis_moe.integrations.transformers.skeleton import PendingModule, Skeleton, place_modules

Models = Callable[..., tuple[Path, Path]]


def place(path: Path, **changes: Any) -> tuple[Skeleton, Any]:
    config = AutoConfig.from_pretrained(path)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with open_checkpoint(path) as checkpoint:
        return place_modules(model, checkpoint), model


def edited(source: Path, folder: Path, edit: Callable[[dict[str, np.ndarray]], object], **config: Any) -> Path:
    """A copy of a checkpoint whose tensors were edited in place."""
    target = folder / "edited"
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(stated | config))
    return target


@pytest.mark.parametrize("model_type", MODELS)
def test_every_quantised_module_gets_a_placeholder(model_type: str, models: Models) -> None:
    skeleton, model = place(models(model_type)[0])
    placed = [each.path for each in (*skeleton.linears, *skeleton.experts)]
    found = [name for name, module in model.named_modules() if isinstance(module, PendingModule)]
    assert sorted(placed) == sorted(found)
    assert all(experts.top_k == 2 for experts in skeleton.experts)
    with pytest.raises(MoeValueError, match="was not prepared"):
        model.get_submodule(placed[0])(torch.zeros(1))


@pytest.mark.parametrize("model_type", MODELS)
def test_placed_tensors_and_no_others_are_ignored_by_name(model_type: str, models: Models) -> None:
    path = models(model_type)[0]
    skeleton, model = place(path)
    patterns = [re.compile(pattern) for pattern in skeleton.ignored_patterns()]
    left = set(model.state_dict())
    assert left
    assert not any(pattern.search(name) for pattern in patterns for name in left)
    assert len(patterns) < 20
    for each in skeleton.linears:
        assert any(pattern.search(f"{each.path}.trellis") for pattern in patterns)
    for each in skeleton.experts:
        assert any(pattern.search(f"{each.path}.3.up_proj.svh") for pattern in patterns)


def test_padded_widths_are_the_models(models: Models) -> None:
    skeleton, _ = place(models("gpt_oss")[0])
    head = next(each for each in skeleton.linears if each.path == "lm_head")
    assert (head.in_features, head.linear.k, head.out_features, head.linear.n) == (160, 256, 256, 256)


def test_an_architecture_that_is_not_supported_lists_those_that_are(models: Models, monkeypatch: Any) -> None:
    monkeypatch.setattr("trellis_moe.integrations.transformers.skeleton.ARCHITECTURES", ("mixtral", "olmoe"))
    with pytest.raises(MoeUnsupportedError, match="'qwen3_moe' are not supported; supported: mixtral, olmoe"):
        place(models("qwen3_moe")[0])


def test_a_layer_without_its_experts_is_refused(models: Models, tmp_path: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]

    path = edited(models("qwen3_moe")[0], tmp_path, drop)
    with pytest.raises(MoeValueError, match=r"no experts for model\.layers\.1\.mlp\.experts \(1 such modules\)"):
        place(path)


def test_another_number_of_experts_is_refused_with_both(models: Models, tmp_path: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".experts.3." in name]:
            del tensors[name]

    path = edited(models("mixtral")[0], tmp_path, drop, num_local_experts=3)
    with pytest.raises(MoeValueError, match="the checkpoint has 3 experts, the model 4"):
        place(path, num_local_experts=4)


def test_another_width_is_refused_with_both(models: Models) -> None:
    path = models("qwen3_moe")[0]
    with pytest.raises(MoeValueError, match=r"o_proj has 128 input channels in the checkpoint, 256 in the model"):
        place(path, num_attention_heads=4)


def test_a_quantised_module_that_is_no_linear_is_refused(models: Models, tmp_path: Path) -> None:
    def rename(tensors: dict[str, np.ndarray]) -> None:
        for suffix in ("trellis", "suh", "svh", "mcg"):
            tensors[f"model.norm.{suffix}"] = tensors.pop(f"lm_head.{suffix}")

    path = edited(models("qwen3_moe")[0], tmp_path, rename)
    with pytest.raises(MoeUnsupportedError, match=r"model\.norm is a Qwen3MoeRMSNorm, quantised as model\.norm"):
        place(path)


def test_a_model_without_experts_per_token_is_refused(models: Models) -> None:
    with pytest.raises(MoeValueError, match="names no experts per token; keys: num_experts_per_tok"):
        place(models("olmoe")[0], num_experts_per_tok=0)
