"""Owns how architectures name the parts of a synthetic model and what their configurations state.

It must not know tensors.  The reader's side is `trellis_format.exl3.names`; the two are tested together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trellis_format.errors import FormatValueError
from trellis_format.source import Projection

__all__ = ["NAMINGS", "Naming", "get_naming"]

_LONG = {Projection.GATE: "gate_proj", Projection.UP: "up_proj", Projection.DOWN: "down_proj"}
_SHORT = {Projection.GATE: "w1", Projection.UP: "w3", Projection.DOWN: "w2"}


@dataclass(frozen=True)
class Naming:
    """The names of one architecture.

    Attributes:
        model_type: `model_type` of its configuration.
        architecture: its model class.
        layers: path of the list of layers.
        block: path of the expert block within a layer.
        words: name of each projection; those that are absent, the experts lack.
        router: path of the router's linear within the block.
        shared: path of the shared expert within the block, or None.
        biased: whether experts and router have biases.
        nested: whether the configuration of the language model is under `text_config`.
        count_key: key of the number of experts.
        width_key: key of an expert's width.
        top_k_key: key of the routes of a token.
        extras: other keys that concern experts.
    """

    model_type: str
    architecture: str
    count_key: str
    width_key: str = "moe_intermediate_size"
    top_k_key: str = "num_experts_per_tok"
    layers: str = "model.layers"
    block: str = "mlp"
    words: Mapping[Projection, str] = field(default_factory=lambda: _LONG)
    router: str = "gate"
    shared: str | None = None
    biased: bool = False
    nested: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)

    def block_path(self, layer: int) -> str:
        """Path of the expert block of a layer."""
        return f"{self.layers}.{layer}.{self.block}"

    def expert_path(self, layer: int, expert: int, projection: Projection) -> str:
        """Module name of one expert's linear."""
        return f"{self.block_path(layer)}.experts.{expert}.{self.words[projection]}"

    def config(self, *, hidden: int, intermediate: int, experts: int, layers: int, top_k: int) -> dict[str, Any]:
        """The configuration of a model; sizes are channels.

        Args:
            hidden: hidden size.
            intermediate: width of an expert.
            experts: routed experts of a layer.
            layers: layers.
            top_k: routes of a token.
        """
        inner = {
            "model_type": self.model_type,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            self.width_key: intermediate,
            self.count_key: experts,
            self.top_k_key: top_k,
            "num_experts_per_tok": top_k,
            "num_hidden_layers": layers,
            "hidden_act": "silu",
            **self.extras,
        }
        if self.nested:
            inner = {"model_type": self.model_type, "text_config": inner}
        return {"architectures": [self.architecture], **inner}


def _deepseek(model_type: str, architecture: str, **more: Any) -> Naming:
    extras = {"n_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 0}
    return Naming(model_type, architecture, "n_routed_experts", shared="shared_experts", extras=extras, **more)


NAMINGS: dict[str, Naming] = {
    "qwen2": Naming("qwen2_moe", "Qwen2MoeForCausalLM", "num_experts", shared="shared_expert"),
    "qwen3": Naming("qwen3_moe", "Qwen3MoeForCausalLM", "num_experts", extras={"norm_topk_prob": True}),
    "qwen3_5": Naming(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "num_experts",
        layers="model.language_model.layers", shared="shared_expert", nested=True,
    ),
    "mixtral": Naming(
        "mixtral", "MixtralForCausalLM", "num_local_experts", "intermediate_size",
        block="block_sparse_moe", words=_SHORT,
    ),
    "minimax_m2": Naming(
        "minimax_m2", "MiniMaxM2ForCausalLM", "num_local_experts", "intermediate_size",
        block="block_sparse_moe", words=_SHORT,
    ),
    "deepseek_v2": _deepseek("deepseek_v2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": _deepseek("deepseek_v3", "DeepseekV3ForCausalLM"),
    "kimi_k2": _deepseek("kimi_k2", "DeepseekV3ForCausalLM"),
    "glm4_moe": _deepseek("glm4_moe", "Glm4MoeForCausalLM"),
    "dots1": _deepseek("dots1", "Dots1ForCausalLM"),
    "gpt_oss": Naming(
        "gpt_oss", "GptOssForCausalLM", "num_local_experts", "intermediate_size",
        router="router", biased=True, extras={"swiglu_limit": 7.0},
    ),
    "llama4": Naming(
        "llama4", "Llama4ForConditionalGeneration", "num_local_experts", "intermediate_size",
        layers="language_model.model.layers", block="feed_forward", router="router", shared="shared_expert",
        nested=True,
    ),
    "hunyuan": Naming(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "num_experts", top_k_key="moe_topk",
        router="gate.wg", shared="shared_mlp",
    ),
    "ernie4_5": Naming(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "moe_num_experts", top_k_key="moe_k", shared="shared_experts",
    ),
    "olmoe": Naming("olmoe", "OlmoeForCausalLM", "num_experts", "intermediate_size"),
    "nemotron_h": Naming(
        "nemotron_h", "NemotronHForCausalLM", "n_routed_experts",
        layers="backbone.layers", block="mixer", words={key: _LONG[key] for key in (Projection.UP, Projection.DOWN)},
        extras={"mlp_hidden_act": "relu2"},
    ),
}  # fmt: skip
"""Every naming by the word that the command takes."""


def get_naming(name: str) -> Naming:
    """The naming of that name.

    Raises:
        FormatValueError: if there is none; names the known ones.
    """
    try:
        return NAMINGS[name]
    except KeyError:
        raise FormatValueError(f"unknown naming {name!r}; known: {', '.join(NAMINGS)}") from None
