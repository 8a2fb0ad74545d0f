"""Holds the loading of whole models to weights that all come from the folder, and every refusal to one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_set import DataSet
from trellis_moe.commands.generation import GenerateRequest, generate
from trellis_moe.commands.whole_model import (
    check_model,
    load_whole,
    muted,
    open_tokenizer,
    read_limits,
    refusing,
)
from trellis_moe.errors import MoeMemoryError, MoeUnsupportedError, MoeValueError
from trellis_prep import PrepMemoryError

pytest.importorskip("transformers", reason="transformers is an extra of trellis-moe")

CPU = torch.device("cpu")
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.fixture
def model(data_set: DataSet, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(data_set.root / "checkpoints" / "tiny_3_mul1", tmp_path / "model"))


def state(model: Path, **changes: Any) -> Path:
    """Change its configuration."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


def store(model: Path, change: Change) -> Path:
    """Change its tensors."""
    path = model / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return model


def without(part: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def load(model: Path) -> tuple[Any, list[str]]:
    return load_whole(model, device=CPU, dtype=None, progress=lambda *_: None)


def test_a_whole_model_has_no_warning(model: Path) -> None:
    loaded, warnings = load(model)
    assert (type(loaded).__name__, warnings) == ("Qwen3MoeForCausalLM", [])


@pytest.mark.parametrize(
    ("part", "first"),
    [
        ("embed_tokens", "model.embed_tokens.weight"),
        ("layers.0.mlp.gate", "model.layers.0.mlp.gate.weight"),
        ("layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj.weight"),
        ("lm_head", "lm_head.weight"),
    ],
)
def test_a_weight_that_is_missing_is_refused_and_not_drawn_at_random(model: Path, part: str, first: str) -> None:
    with pytest.raises(MoeValueError, match=f"weights of Qwen3MoeForCausalLM that it lacks: 1, first {first}; either"):
        load(store(model, without(part)))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("qwen2_moe", r"weights of Qwen2MoeForCausalLM that it lacks: 8, first .*shared_expert.*"),
        ("llama", r"weights of LlamaForCausalLM that it lacks: 6, first model\.layers\.0\.mlp\.down_proj\.weight"),
        ("bert", r"BertLMHeadModel has a module for none of the checkpoint's 57 linears"),
    ],
)
def test_another_model_than_the_tensors_is_refused(model: Path, model_type: str, message: str) -> None:
    with pytest.raises(MoeValueError, match=message):
        load(state(model, model_type=model_type))


def test_a_weight_of_another_shape_is_named_with_both(model: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate = "model.layers.0.mlp.gate.weight"
        return tensors | {gate: tensors[gate][:4].clone()}

    with pytest.raises(
        MoeValueError, match=r"mlp\.gate\.weight has shape \[4, 256\] in the checkpoint, \[8, 256\] in the"
    ):
        load(store(model, cut))


def test_a_tensor_without_a_place_is_a_warning(model: Path) -> None:
    _, warnings = load(store(model, lambda tensors: tensors | {"model.odd.weight": torch.ones(2)}))
    assert warnings == [f"{model}: tensors that Qwen3MoeForCausalLM has no place for: 1, first model.odd.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "nonesuch"}, "cannot load the model: KeyError: 'nonesuch'"),
        ({"num_attention_heads": 0}, "cannot load the model: ZeroDivisionError: "),
        ({"hidden_size": -1}, "cannot load the model: RuntimeError: "),
        ({"num_experts_per_tok": 9}, r"layers\.0\.mlp\.experts: the model takes 9 experts per token, of 8"),
    ],
)
def test_what_transformers_cannot_load_is_one_line(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MoeValueError, match=message) as caught:
        load(state(model, **changes))
    assert "\n" not in str(caught.value)


def test_a_folder_without_its_shard_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(MoeValueError, match=r"cannot load the model: OSError: .*model\.safetensors"):
        load(model)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "256"}, {"torch_dtype": "float13", "dtype": "float13"}],
    ids=["a word for a number", "an unknown dtype"],
)
def test_a_configuration_that_transformers_does_not_take_is_refused(model: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(MoeValueError, match=r"cannot read config\.json: "):
        read_limits(state(model, **changes))


def test_limits_are_the_configuration_s(model: Path) -> None:
    assert read_limits(model) == (512, 512)
    assert read_limits(state(model, max_position_embeddings=40)) == (512, 40)


@pytest.mark.parametrize("model_type", ["nonesuch", None, 3, ["qwen3_moe"]])
def test_model_types_that_transformers_lacks_are_refused(model: Path, model_type: object) -> None:
    check_model(model)
    with pytest.raises(MoeUnsupportedError, match=r"is not in transformers .*; supported with experts: .*qwen3_moe"):
        check_model(state(model, model_type=model_type))


def test_other_folders_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MoeValueError, match=r"has no config\.json, which says what model it is"):
        check_model(tmp_path)
    with pytest.raises(MoeUnsupportedError, match="quant_method is None; whole models are loaded from 'exl3'"):
        check_model(state(model, quantization_config=None))


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}'], ids=["not JSON", "no tokenizer"])
def test_a_broken_tokenizer_is_refused_where_it_is_needed(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(MoeValueError, match=r"cannot open the tokenizer \(token ids can be given with --ids\): "):
        open_tokenizer(model, is_needed=True)
    report = generate(GenerateRequest(model=model, ids=(1,), device="cpu", max_new_tokens=1))
    assert report["text"] == str(report["new_ids"][0])


def test_a_missing_tokenizer_is_refused_where_it_is_needed(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert open_tokenizer(model, is_needed=False) is None
    with pytest.raises(MoeValueError, match=r"has no tokenizer \(tokenizer\.json, .*\); give token ids with --ids"):
        open_tokenizer(model, is_needed=True)


def test_errors_of_the_packages_and_interrupts_pass() -> None:
    for error in (MoeUnsupportedError("ours"), PrepMemoryError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)), refusing(Path("m"), "load"):
            raise error


def test_a_defect_of_the_packages_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    from trellis_moe.integrations.transformers import fill

    monkeypatch.setattr(fill, "ActivationSpec", None)  # calling it is a TypeError in the packages' own code
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        load(model)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), MemoryError()])
def test_too_little_memory_is_one_line(error: BaseException) -> None:
    message = r"m: cannot load: out of memory: (CUDA .* 2 GiB|it does not say why)$"
    with pytest.raises(MoeMemoryError, match=message), refusing(Path("m"), "load"):
        raise error


def test_transformers_says_as_much_after_as_before() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with muted():
        assert logging.get_verbosity() == logging.ERROR
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
