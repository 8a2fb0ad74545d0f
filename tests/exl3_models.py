"""Owns small models of Hugging Face architectures, as EXL3 checkpoints of random codes and as what the codes stand for.

It must not import trellis_moe.  A model's weights get their names from transformers itself, which writes checkpoints as
the authors of the architecture do; every linear that EXL3's converter quantises then becomes random codes in one
directory and the weight that these codes stand for, computed in float64, in the other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.rates import Rate
from trellis_format.reference import reconstruct

__all__ = ["MODELS", "write_models"]

_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256, "head_dim": 64}
_COMMON = {
    **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2,
    "intermediate_size": 256, "moe_intermediate_size": 128, "initializer_range": 0.05, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
}  # fmt: skip
_GROUPED = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 128},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    "deepseek_v2": {**_LATENT, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "glm4_moe": {**_GROUPED, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    "dots1": {**_GROUPED, "routed_scaling_factor": 1.5},
    "olmoe": {"num_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "intermediate_size": 128},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "gpt_oss": {"num_local_experts": 4, "hidden_size": 160, "intermediate_size": 192, "head_dim": 64},
    "llama": {},
}
"""Configuration of each model by `model_type`, beside what is common to all."""
_QUANTISED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2",
    "w3", "lm_head",
)  # fmt: skip
_RATES = ("3", "2", "3.5")
_Array = np.ndarray[Any, Any]


def write_models(folder: Path, model_type: str, *, codebook: str = "mcg", **changes: Any) -> tuple[Path, Path]:
    """Write a model twice.

    Args:
        folder: gets the two directories.
        model_type: a key of `MODELS`.
        codebook: of all linears.
        changes: of the configuration.

    Returns:
        Directories of the EXL3 checkpoint and of the same model in float32.
    """
    config = AutoConfig.for_model(model_type, **{**_COMMON, **MODELS[model_type], **changes})
    torch.manual_seed(zlib.crc32(model_type.encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill_routers(model, config.initializer_range)
    exl3, plain = folder / "exl3", folder / "plain"
    model.save_pretrained(plain)
    quantised: dict[str, _Array] = {}
    decoded: dict[str, _Array] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        rounded = weight.astype(np.float16)
        decoded[name] = rounded.astype(np.float32)
        if name.rpartition(".")[2] in ("gate_up_proj", "down_proj"):
            linears = list(_stacked(name))
        else:
            linears = [(name.removesuffix(".weight"), slice(None))] if _is_quantised(name, weight) else []
        for module, part in linears:
            view = decoded[name][part] if isinstance(part, tuple) else decoded[name].T
            codes, matrix = _random_linear(module, view.shape, codebook)
            view[...] = matrix
            quantised |= codes
        if not linears:
            quantised |= _biases(name, rounded)
    save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
    exl3.mkdir()
    save_file(quantised, exl3 / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((plain / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "exl3", "version": "1.6.5", "bits": 3.0, "codebook": codebook}
    (exl3 / "config.json").write_text(json.dumps(stated | {"dtype": "float16"}))
    return exl3, plain


def _fill_routers(model: torch.nn.Module, spread: float) -> None:
    """Give values to routers that some releases leave at zero, whose ties every device breaks its own way."""
    for module in model.modules():
        weight = getattr(module, "weight", None) if "Router" in type(module).__name__ else None
        if weight is not None and not weight.any():
            torch.nn.init.normal_(weight, std=spread)


def _is_quantised(name: str, weight: _Array) -> bool:
    words = name.split(".")
    return words[-1] == "weight" and words[-2] in _QUANTISED and weight.ndim == 2


def _stacked(name: str, experts: int = 4) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The linears in a tensor of all experts, as gpt-oss has them: `[experts, in, out]`, gate and up interleaved."""
    prefix, _, word = name.rpartition(".")
    for expert in range(experts):
        if word == "down_proj":
            yield f"{prefix}.{expert}.down_proj", (expert,)
        else:
            yield f"{prefix}.{expert}.gate_proj", (expert, slice(None), slice(0, None, 2))
            yield f"{prefix}.{expert}.up_proj", (expert, slice(None), slice(1, None, 2))


def _biases(name: str, values: _Array) -> dict[str, _Array]:
    """A tensor that is not quantised, under its names in EXL3: those of all experts' biases are split and padded."""
    prefix, _, word = name.rpartition(".")
    if word not in ("gate_up_proj_bias", "down_proj_bias"):
        padded = np.pad(values, (0, -len(values) % 128)) if _is_bias_of_linear(name) else values
        return {name: padded}
    found = {}
    for module, part in _stacked(f"{prefix}.{word.removesuffix('_bias')}"):
        row = values[(part[0], *part[2:])]
        found[f"{module}.bias"] = np.ascontiguousarray(np.pad(row, (0, -len(row) % 128)))
    return found


def _is_bias_of_linear(name: str) -> bool:
    words = name.split(".")
    return words[-1] == "bias" and words[-2] in _QUANTISED


def _random_linear(module: str, shape: tuple[int, ...], codebook: str) -> tuple[dict[str, _Array], _Array]:
    """The tensors of a linear of random codes, and its `[in, out]` weight of about unit gain; channels are padded."""
    rng = np.random.default_rng(zlib.crc32(module.encode()))
    rate = Rate.of(_RATES[zlib.crc32(module.encode()) % len(_RATES)] if codebook == "mul1" else "3")
    (k, n), (padded_k, padded_n) = shape, (side + -side % 128 for side in shape)
    codes = rng.integers(-(2**15), 2**15, (padded_k // 16, padded_n // 16, rate.tile_words16), dtype=np.int16)
    suh, svh = (rng.choice([-1.0, 1.0], side) * rng.uniform(0.7, 1.4, side) for side in (padded_k, padded_n))
    suh /= np.sqrt(k)
    suh[k:], svh[n:] = 0, 0
    halves = {"suh": suh.astype(np.float16), "svh": svh.astype(np.float16)}
    tensors = {f"{module}.trellis": codes} | {f"{module}.{suffix}": values for suffix, values in halves.items()}
    marker = EXL3_CODEBOOKS[codebook]
    if marker.marker is not None:
        tensors[f"{module}.{marker.marker}"] = np.array(marker.multiplier, np.uint32).view(np.int32)
    return tensors, reconstruct(codes, halves["suh"], halves["svh"], codebook, rate)[:k, :n]
