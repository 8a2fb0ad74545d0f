"""Owns what a model's `config.json` says about its experts.  It must not know tensors.

Where a configuration and tensors both speak, tensors decide.

Model configurations are foreign files with hundreds of keys, so unknown keys are ignored here, unlike anywhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from trellis_format.activations import Activation
from trellis_format.errors import FormatValueError
from trellis_format.extent import BLOCK

__all__ = ["ModelConfig", "parse_model_config", "true_width"]

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_WIDTH_KEYS = ("moe_intermediate_size", "intermediate_size")
_HIDDEN_KEYS = ("moe_latent_size", "hidden_size")
_EXPERT_KEYS = (*_EXPERT_COUNT_KEYS, "moe_intermediate_size", "num_experts_per_tok")
_ACTIVATION_KEYS = ("mlp_hidden_act", "hidden_act", "hidden_activation")
_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "situ": "situ",
    "relu2": "relu2",
}
_UP_DIVISOR = 128.0  # keeps gate * up of these architectures inside fp16; the files do not record it
_DIVIDED_MODEL_TYPES = ("laguna", "mistral4")
_DIVIDED_LAYERS = {"MiMoV2ForCausalLM": (47,)}


_Size = Annotated[StrictInt, Field(gt=0)]
_ExpertSize = Annotated[StrictInt, Field(ge=0)]  # 0 in configurations of models, or layers, without experts


class ModelConfig(BaseModel):
    """The keys of `config.json` that concern experts, as the file states them."""

    # Foreign files: see the module docstring.  Their key `model_type` is no name of pydantic's.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_type: StrictStr | None = None
    architectures: tuple[StrictStr, ...] | None = None
    hidden_size: _Size | None = None
    moe_latent_size: _ExpertSize | None = None
    intermediate_size: _Size | list[_ExpertSize] | None = None
    moe_intermediate_size: _ExpertSize | list[_ExpertSize] | None = None
    num_experts: _ExpertSize | None = None
    num_local_experts: _ExpertSize | None = None
    n_routed_experts: _ExpertSize | None = None
    moe_num_experts: _ExpertSize | list[_ExpertSize] | None = None
    num_experts_per_tok: _ExpertSize | list[_ExpertSize] | None = None
    norm_topk_prob: StrictBool | None = None
    hidden_act: StrictStr | None = None
    mlp_hidden_act: StrictStr | None = None
    hidden_activation: StrictStr | None = None
    swiglu_limit: float | list[float | None] | None = None

    def zeros(self) -> tuple[str, ...]:
        """The keys that state a zero, which no model with experts has."""
        return tuple(key for key in _EXPERT_KEYS if getattr(self, key) == 0)

    def expert_count(self) -> int | None:
        """Routed experts of a layer, None where the file does not say."""
        return self._first_int(_EXPERT_COUNT_KEYS)

    def expert_widths(self) -> dict[str, int]:
        """Candidate widths of an expert, in channels, by the key that states them, most specific first."""
        return self._ints(_EXPERT_WIDTH_KEYS)

    def hidden_sizes(self) -> dict[str, int]:
        """Candidate widths of an expert's input, in channels, by the key that states them, most specific first."""
        return self._ints(_HIDDEN_KEYS)

    def top_k(self) -> int | None:
        """Routes of a token, None where the file does not say."""
        return self._first_int(("num_experts_per_tok",))

    def activation(self) -> Activation | None:
        """The activation of the experts, None where the file does not say or names one that is not known.

        Raises:
            FormatValueError: if the limit that the file states is not positive.
        """
        if self.model_type == "gpt_oss":
            law = Activation.named("swigluoai")
            return replace(law, limit=self.swiglu_limit) if isinstance(self.swiglu_limit, float) else law
        key = self.activation_key()
        kind = _ACTIVATION_NAMES.get(getattr(self, key)) if key else None
        if kind == "silu" and self.swiglu_limit and isinstance(self.swiglu_limit, float):
            return Activation(kind, limit=self.swiglu_limit)
        return Activation.named(kind) if kind else None

    def activation_key(self) -> str | None:
        """The key that states the activation, None where there is none."""
        if self.model_type == "gpt_oss":
            return "model_type"
        return next((key for key in _ACTIVATION_KEYS if getattr(self, key)), None)

    def up_divisor(self, layer: int) -> float:
        """The number by which the architecture divides up of a layer's routed experts before they are quantised.

        Source: the architecture definitions of exllamav3, which multiply the route weights by it.
        """
        divided = self.model_type in _DIVIDED_MODEL_TYPES or any(
            layer in _DIVIDED_LAYERS.get(name, ()) for name in self.architectures or ()
        )
        return _UP_DIVISOR if divided else 1.0

    def _ints(self, keys: tuple[str, ...]) -> dict[str, int]:
        values = {key: getattr(self, key) for key in keys}
        firsts = {key: value[0] if isinstance(value, list) and value else value for key, value in values.items()}
        return {key: value for key, value in firsts.items() if isinstance(value, int) and value > 0}

    def _first_int(self, keys: tuple[str, ...]) -> int | None:
        return next(iter(self._ints(keys).values()), None)


def parse_model_config(config: dict[str, Any] | None, *, file: str) -> ModelConfig:
    """Read the expert keys of a parsed `config.json`; keys under `text_config` win over the same at the top.

    Args:
        config: the parsed file, or None for an empty configuration.
        file: named in errors.

    Raises:
        FormatValueError: if a key that concerns experts has the wrong type, or a size is negative or
            cannot be zero; names the key.
    """
    merged = dict(config or {})
    nested = merged.get("text_config")
    if isinstance(nested, dict):
        merged |= nested
    try:
        return ModelConfig.model_validate(merged)
    except ValidationError as error:
        first = max(error.errors(), key=lambda fault: len(fault["loc"]))  # inside a list, not that it is no number
        key = ".".join(str(part) for part in first["loc"] if part == first["loc"][0] or isinstance(part, int))
        raise FormatValueError(f"{key}: {first['msg']}, got {str(first['input'])[:80]!r}", file=file) from error


def true_width(stored: int, candidates: dict[str, int]) -> int:
    """The width, in channels, that a stored one stands for.

    Args:
        stored: channels with padding.
        candidates: stated widths by key, as `ModelConfig.hidden_sizes` gives them.

    Returns:
        The first candidate that is the stored width when it is rounded up to 128; else the stored width.
    """
    return next((width for width in candidates.values() if -(-width // BLOCK) * BLOCK == stored), stored)
