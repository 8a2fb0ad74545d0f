"""Owns one layer's way from a checkpoint to an output, timed: open, describe, plan, prepare, bind, run.

It must not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from trellis_format.activations import Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep import PreparedExperts, TrellisStaging, rank_extent

from trellis_moe.binding import bind
from trellis_moe.errors import MoeValueError
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.plan import ExecutionPlan, WeightPlan, plan_execution, plan_weights
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, io_dtype_name

__all__ = ["Layer", "LayerRun", "choose_device", "open_layer", "run_layer"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Layer:
    """A described layer."""

    source: TrellisSource
    weights: TrellisWeights
    open_seconds: float


@dataclass(frozen=True, eq=False)
class LayerRun:
    """What a run gave and what it took."""

    y: torch.Tensor
    plan: ExecutionPlan
    experts: PreparedExperts
    prepare_seconds: float
    run_seconds: float


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None is a GPU where there is one, else the CPU.

    Raises:
        MoeValueError: if a CUDA device is asked for where none is visible.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise MoeValueError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    return torch.device(name)


def open_layer(
    checkpoint: Path,
    layer: int,
    *,
    activation: Activation | None = None,
    pattern: str | None = None,
    ignore_index: bool = False,
) -> Layer:
    """Open and describe one layer.

    Args:
        checkpoint: its directory.
        layer: index of the layer.
        activation: overrides what `config.json` says.
        pattern: regular expression of expert names.
        ignore_index: do not compare the shards with the index.

    Raises:
        FormatError: if the checkpoint or the layer breaks a rule.
        MoeValueError: if no activation is known.
    """
    begin = time.perf_counter()
    opened = open_checkpoint(checkpoint, ignore_index=ignore_index)
    described = find_layer(opened, layer) if pattern is None else find_layer(opened, layer, pattern=pattern)
    source, weights = trellis_from_exl3(described, activation=activation)
    if source.activation is None:
        raise MoeValueError(
            f"{checkpoint / 'config.json'}: names no activation of the experts that is known "
            f"(hidden_act {described.config.hidden_act!r}, model_type {described.config.model_type!r}); give --activation"
        )
    return Layer(source, weights, time.perf_counter() - begin)


def run_layer(
    layer: Layer,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    staging: TrellisStaging | None = None,
    progress: Progress | None = None,
) -> LayerRun:
    """Plan, prepare, bind and run.

    Args:
        layer: from `open_layer`.
        x: `[tokens, hidden]` float16, bfloat16 or float32.
        topk_ids: `[tokens, top_k] int32 or int64`.
        topk_weights: `[tokens, top_k]`.
        device: where to run.
        rank: tensor-parallel rank.
        world_size: number of ranks; the result is the rank's partial sum.
        staging: bounds of preparation.
        progress: called with (stage, done, total).

    Raises:
        PrepError, MoeError, FormatError: if a plan, a device or a file does not hold up.
    """
    tell = progress or (lambda stage, done, total: None)
    extent = rank_extent(layer.source.geometry.padded_intermediate_size, rank, world_size)
    weight_plan: WeightPlan = plan_weights(layer.source, extent)
    assert layer.source.activation is not None  # open_layer refuses a layer without one
    plan = plan_execution(
        weight_plan,
        activation=ActivationSpec(nonlinearity=layer.source.activation, io_dtype=io_dtype_name(x.dtype)),
        capacity=ExecutionCapacity(max_tokens=max(x.shape[0], 1), top_k=topk_ids.shape[1]),
        device=device,
    )
    begin = time.perf_counter()
    experts = prepare_weights(
        weight_plan,
        layer.weights,
        device=device,
        staging=staging,
        progress=lambda done, total: tell("prepare", done, total),
    )
    prepared = time.perf_counter()
    binding = bind(plan, experts)
    y = torch.empty(x.shape, dtype=torch.float32, device=experts.device)
    inputs = (tensor.to(experts.device) for tensor in (x, topk_ids, topk_weights))
    binding.run(*inputs, out=y, progress=lambda done, total: tell("run", done, total))
    result = y.cpu()
    return LayerRun(result, plan, experts, prepared - begin, time.perf_counter() - prepared)
