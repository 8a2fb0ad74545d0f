"""Owns the softmax router that the demo needs to make routes from a checkpoint's own gate.  It must not run experts."""

from __future__ import annotations

import torch

from trellis_format.checkpoint import Checkpoint
from trellis_format.exl3.layers import Exl3Layer
from trellis_moe.errors import MoeUnsupportedError, MoeValueError

__all__ = ["route"]

_SOFTMAX_ROUTERS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")


def route(checkpoint: Checkpoint, layer: Exl3Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens by softmax over all experts, top-k, renormalised where the configuration says so.

    Args:
        checkpoint: holds the router's weight, `[experts, hidden] float16`, beside the experts.
        layer: the layer.
        x: `[tokens, hidden]`.

    Returns:
        `[tokens, top_k] int64` ids and `[tokens, top_k] float16` weights.

    Raises:
        MoeUnsupportedError: if the model's router is not a softmax one.
        MoeValueError: if the router's weight is missing or has another shape, or the configuration lacks
            num_experts_per_tok.
    """
    config = layer.config
    if config.model_type not in _SOFTMAX_ROUTERS:
        raise MoeUnsupportedError(
            f"the demo routes models of type {', '.join(_SOFTMAX_ROUTERS)}, this one is {config.model_type!r}; use "
            "`trellis-moe run` with routes of your own"
        )
    name = layer.key.prefix.removesuffix("experts") + "gate.weight"
    shape = (len(layer.experts), x.shape[1])
    gate = checkpoint.tensors.get(name)
    if gate is None or gate.shape != shape:
        raise MoeValueError(f"{checkpoint.path}: {name}: the router must be {shape}, got {gate and gate.shape}")
    top_k = config.top_k()
    if top_k is None or not 1 <= top_k <= shape[0]:
        raise MoeValueError(f"{checkpoint.path}: num_experts_per_tok must be 1 to {shape[0]}, got {top_k}")
    logits = x.double() @ torch.from_numpy(gate.read()).double().T
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
    if config.norm_topk_prob or config.model_type == "mixtral":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights.to(torch.float16)
