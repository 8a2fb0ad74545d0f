"""Holds the quantizer to transformers' extension point: what it is registered for, what it refuses, what it leaves."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from trellis_moe.errors import MoeTypeError, MoeUnsupportedError, MoeValueError
from trellis_moe.integrations.transformers import METHOD, Exl3Config, Exl3Quantizer, TrellisExperts

Models = Callable[..., tuple[Path, Path]]


def load(path: Path, **arguments: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **arguments)


def test_it_is_registered_under_the_method_of_the_files() -> None:
    assert METHOD == "exl3"
    assert AUTO_QUANTIZER_MAPPING[METHOD] is Exl3Quantizer
    assert AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] is Exl3Config


def test_the_configuration_keeps_what_the_file_states(models: Models) -> None:
    model = load(models("qwen3_moe")[0])
    stated = json.loads((models("qwen3_moe")[0] / "config.json").read_text())["quantization_config"]
    assert model.config.quantization_config.to_dict() == stated
    assert model.is_quantized
    assert model.hf_quantizer.is_compileable
    assert not model.training


def test_nothing_is_missing_and_nothing_unexpected(models: Models) -> None:
    for model_type in ("deepseek_v3", "mixtral", "gpt_oss"):
        _, found = load(models(model_type)[0], output_loading_info=True)
        assert {key: sorted(value) for key, value in found.items() if value} == {}, model_type


def test_transformers_reports_linears_that_the_model_has_no_module_for(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = models("llama")[0]
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    logging.getLogger("transformers").propagate = True
    _, found = load(tmp_path, output_loading_info=True)
    assert "model.layers.1.self_attn.k_proj.trellis" not in found["missing_keys"]
    assert all(name.startswith("model.layers.1.") for name in found["unexpected_keys"])


def test_a_tensor_of_another_shape_is_refused_by_its_name(models: Models, tmp_path: Path) -> None:
    path, gate = models("qwen3_moe")[0], "model.layers.0.mlp.gate.weight"
    tensors = load_file(path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(path / "config.json")
    save_file(tensors | {gate: tensors[gate][:2].clone()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((MoeValueError, RuntimeError)):  # of this package where transformers loads it all the same
        load(tmp_path)
    quantizer = Exl3Quantizer(Exl3Config())
    model = torch.nn.Linear(3, 5)
    quantizer._shapes = {"weight": (5, 4), "bias": (5,), "gone": (1,)}
    with pytest.raises(MoeValueError, match=r"weight has shape \[5, 3\] in the checkpoint, \[5, 4\] in the model"):
        quantizer._check_shapes(model)


def test_several_devices_are_refused() -> None:
    quantizer = Exl3Quantizer(Exl3Config())
    quantizer.validate_environment(device_map={"model": "cpu", "lm_head": torch.device("cpu")})
    with pytest.raises(MoeUnsupportedError, match="several devices: cpu, cuda:1; a process loads a model onto one"):
        quantizer.validate_environment(device_map={"model": "cpu", "lm_head": "cuda:1"})


def test_a_map_that_transformers_would_plan_is_one_device(models: Models) -> None:
    model = load(models("qwen3_moe")[0], device_map="auto")
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert {parameter.device.type for parameter in model.parameters()} == {wanted}
    experts = next(module for module in model.modules() if isinstance(module, TrellisExperts))
    assert experts.layer.prepared.device.type == wanted


def test_activations_of_another_dtype_are_refused(models: Models) -> None:
    with pytest.raises(MoeTypeError, match=r"one of float16, bfloat16, float32, got torch\.float64"):
        load(models("qwen3_moe")[0], dtype=torch.float64)


def test_a_state_dict_is_refused() -> None:
    with pytest.raises(MoeValueError, match="a state dict was given"):
        Exl3Quantizer(Exl3Config()).preprocess_model(torch.nn.Linear(2, 2), checkpoint_files=None)


def test_a_model_is_not_saved(models: Models, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exl3"):
        load(models("qwen3_moe")[0]).save_pretrained(tmp_path)


def test_without_transformers_the_extra_is_named() -> None:
    code = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "try:\n    import trellis_moe.integrations.transformers\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MoeUnsupportedError transformers is not installed; it is the extra `transformers`")


def test_trellis_moe_itself_needs_no_transformers() -> None:
    code = "import sys, trellis_moe.cli, trellis_moe.linear, trellis_moe.module; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
