"""Owns the record of vLLM's hooks that trellis's plugin relies on, and stand-ins for them where vLLM is not installed.

The record is what an installed vLLM said about itself; tests hold the stand-ins, and the plugin's own methods, to it.

    python tests/vllm_hooks.py        writes it anew; needs vLLM
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RECORD = Path(__file__).with_suffix(".json")
_LAYERS = "vllm.model_executor.layers"
_BASE = f"{_LAYERS}.quantization.base_config"
HOOKS: dict[str, tuple[str, ...]] = {
    "vllm.config:get_current_vllm_config": ("",),
    f"{_LAYERS}.quantization:register_quantization_config": ("",),
    "vllm.model_executor.model_loader.weight_utils:download_weights_from_hf": ("",),
    "vllm.model_executor.models.utils:WeightsMapper": ("__init__", "map_name"),
    f"{_BASE}:QuantizeMethodBase": ("process_weights_after_loading", "tie_weights"),
    f"{_BASE}:QuantizationConfig": (
        *("get_name", "get_supported_act_dtypes", "get_min_capability", "get_config_filenames", "from_config"),
        *("get_quant_method", "get_checkpoint_weight_mapper", "apply_vllm_mapper", "maybe_update_config"),
    ),
    f"{_LAYERS}.linear:LinearMethodBase": ("create_weights", "apply"),
    f"{_LAYERS}.linear:UnquantizedLinearMethod": ("__init__",),
    f"{_LAYERS}.fused_moe:FusedMoEMethodBase": (
        *("__init__", "create_weights", "get_fused_moe_quant_config", "maybe_roundup_sizes", "apply"),
    ),
}
"""Functions (an empty name) and methods by their home, `module:name`."""
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_LAYERS}.linear:LinearBase": ("tp_rank", "tp_size"),
    f"{_LAYERS}.linear:QKVParallelLinear": ("num_kv_head_replicas",),
    f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead": ("tp_rank", "shard_indices"),
    f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices": ("org_vocab_start_index",),
    f"{_LAYERS}.fused_moe:RoutedExperts": ("moe_config", "expert_map_manager", "apply_router_weight_on_input"),
    f"{_LAYERS}.fused_moe.expert_map_manager:ExpertMapManager": ("expert_map",),
    f"{_LAYERS}.fused_moe.config:FusedMoEConfig": (
        *("num_experts", "hidden_dim", "experts_per_token", "max_num_tokens", "moe_parallel_config"),
    ),
    f"{_LAYERS}.fused_moe.config:FusedMoEParallelConfig": ("tp_rank", "tp_size", "dp_size", "use_ep"),
    f"{_BASE}:QuantizationConfig": ("packed_modules_mapping",),
}
"""What the plugin reads from instances."""

_MARKS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "POSITIONAL_OR_KEYWORD": "", "KEYWORD_ONLY": "keyword "}


def parameters_of(function: Any) -> list[str]:
    """The parameters of a function as the record has them: name, kind, and `=` where there is a default."""
    found = inspect.signature(function).parameters.values()
    return [
        f"{_MARKS[each.kind.name]}{each.name}{'' if each.default is inspect.Parameter.empty else '='}"
        for each in found
        if each.name not in ("self", "cls")
    ]


def describe() -> dict[str, Any]:
    """The record of the vLLM that is installed.

    Raises:
        AttributeError: if it lacks a hook or an attribute.
    """
    signatures = {}
    for home, names in HOOKS.items():
        owner = _find(home)
        for name in names:
            signatures[f"{home}.{name}".rstrip(".")] = parameters_of(getattr(owner, name) if name else owner)
    for home, names in ATTRIBUTES.items():
        for name in names:
            if not _has(_find(home), name):
                raise AttributeError(f"{home} has no {name}")
    return {"vllm": importlib.metadata.version("vllm").partition("+")[0], "signatures": signatures}


def read_record() -> dict[str, Any]:
    """The record in the repository."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def _find(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)


def _has(owner: type, name: str) -> bool:
    """Whether instances have an attribute: one of the class, a field of it, or one that a method sets."""
    classes = [each for each in owner.__mro__ if each.__module__.startswith("vllm.")]
    declared = any(name in vars(each) or name in getattr(each, "__annotations__", {}) for each in classes)
    return declared or any(f"self.{name}" in inspect.getsource(each) for each in classes)


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None: ...

    @abstractmethod
    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        raise NotImplementedError

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        raise NotImplementedError


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None: ...

    @abstractmethod
    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any: ...


class UnquantizedLinearMethod(LinearMethodBase):
    def __init__(self) -> None: ...

    def create_weights(self, *given: Any, **named: Any) -> None: ...

    def apply(self, *given: Any, **named: Any) -> Any: ...


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        self.moe = moe

    @abstractmethod
    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None: ...

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: Any) -> Any: ...

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> Any: ...

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> Any: ...


@dataclass
class WeightsMapper:
    orig_to_new_renaming: list[Any] = field(default_factory=list)
    orig_to_new_regex: dict[Any, Any] = field(default_factory=dict)
    orig_to_new_substr: dict[str, Any] = field(default_factory=dict)
    orig_to_new_stacked: dict[str, Any] = field(default_factory=dict)
    orig_to_new_prefix: dict[str, Any] = field(default_factory=dict)
    orig_to_new_suffix: dict[str, Any] = field(default_factory=dict)

    def map_name(self, key: str) -> str | None:
        """What vLLM's does for the rules that the plugin and these tests use."""
        for old, (new, _shard) in self.orig_to_new_stacked.items():
            key = key.replace(old, new, 1)
        for old, new in self.orig_to_new_prefix.items():
            key = new + key.removeprefix(old) if key.startswith(old) else key
        return None if any(key.endswith(suffix) for suffix in self.orig_to_new_suffix) else key


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> Any: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Any: ...

    @abstractmethod
    def get_quant_method(self, layer: Any, prefix: str) -> Any: ...

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        raise NotImplementedError

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        raise NotImplementedError

    def maybe_update_config(self, model_name: Any, hf_config: Any = None, revision: Any = None) -> None:
        raise NotImplementedError


class LinearBase(torch.nn.Module):
    """A linear of one rank."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1, num_kv_head_replicas: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.num_kv_head_replicas = tp_rank, tp_size, num_kv_head_replicas


class ParallelLMHead(torch.nn.Module):
    """A head of one rank, by the first entry of its part of the vocabulary."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.tp_rank, self.shard_indices = 0, SimpleNamespace(org_vocab_start_index=start)


class RoutedExperts(torch.nn.Module):
    """The experts of one rank, by vLLM's description of the layer."""

    def __init__(self, moe: Any = None, expert_map: list[int] | None = None, *, weighs_inputs: bool = False) -> None:
        super().__init__()
        self.moe_config, self.apply_router_weight_on_input = moe, weighs_inputs
        self.expert_map_manager = SimpleNamespace(expert_map=None if expert_map is None else torch.tensor(expert_map))


REGISTERED: dict[str, type] = {}
"""What was registered with the stand-in, by name."""
CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(enable_dbo=False))
"""What vLLM would be configured with."""


def register_quantization_config(quantization: str) -> Any:
    """As vLLM's, into `REGISTERED`."""
    return lambda cls: REGISTERED.setdefault(quantization, cls)


def get_current_vllm_config() -> Any:
    """`CONFIG`."""
    return CONFIG


def download_weights_from_hf(
    model_name_or_path: str,
    cache_dir: str | None,
    allow_patterns: list[str],
    revision: str | None = None,
    subfolder: str | None = None,
    ignore_patterns: str | list[str] | None = None,
) -> str:
    """No stand-in for a download."""
    raise OSError(f"{model_name_or_path}: nothing is downloaded in tests")


def stand_ins() -> dict[str, ModuleType]:
    """Modules of vLLM, by name, that hold the stand-ins."""
    homes = {home.partition(":")[0] for home in (*HOOKS, *ATTRIBUTES)} | {"vllm"}
    modules = {name: ModuleType(name) for name in homes}
    for home in (*HOOKS, *ATTRIBUTES, f"{_LAYERS}.linear:UnquantizedLinearMethod"):
        module, _, name = home.partition(":")
        if name in globals():
            setattr(modules[module], name, globals()[name])
    return modules


if __name__ == "__main__":
    RECORD.write_text(json.dumps(describe(), indent=1) + "\n")
    print(RECORD)
