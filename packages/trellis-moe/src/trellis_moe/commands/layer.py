"""Owns one layer's way from a checkpoint to an output, timed: open, describe, plan, prepare, bind, run.

It must not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trellis_format.activations import ACTIVATIONS, Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_moe.binding import Binding, bind
from trellis_moe.errors import MoeValueError
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.plan import ExecutionPlan, WeightPlan, plan_execution, plan_weights
from trellis_moe.scratch import op_by_op_scratch, total_bytes
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec, io_dtype_name
from trellis_prep import PreparedExperts, TrellisStaging, rank_extent

__all__ = ["MAX_SCRATCH_BYTES", "Layer", "LayerRun", "choose_device", "open_layer", "run_layer"]

MAX_SCRATCH_BYTES = 256 << 20
"""Most scratch of a launch, in bytes; more tokens are run in several launches."""

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
        key = described.config.activation_key() or "hidden_act"
        raise MoeValueError(
            f"{checkpoint / 'config.json'}: {key} is {getattr(described.config, key)!r}, no activation that is known; "
            f"give --activation, one of {', '.join(ACTIVATIONS)}"
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
    tell = progress or (lambda _stage, _done, _total: None)
    extent = rank_extent(layer.source.geometry.padded_intermediate_size, rank, world_size)
    weight_plan: WeightPlan = plan_weights(layer.source, extent)
    assert layer.source.activation is not None  # open_layer refuses a layer without one
    plan = _plan(weight_plan, layer.source.activation, x, topk_ids, topk_weights, device)
    begin = time.perf_counter()
    experts = prepare_weights(
        weight_plan,
        layer.weights,
        device=device,
        staging=staging,
        progress=lambda done, total: tell("prepare", done, total),
    )
    prepared = time.perf_counter()
    y = _launch(bind(plan, experts), x, topk_ids, topk_weights, tell)
    return LayerRun(y, plan, experts, prepared - begin, time.perf_counter() - prepared)


def _plan(
    weights: WeightPlan,
    activation: Activation,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    device: torch.device,
) -> ExecutionPlan:
    """One launch over all tokens where its scratch stays within its bound, else launches over parts of them."""

    def plan(tokens: int) -> ExecutionPlan:
        return plan_execution(
            weights,
            activation=ActivationSpec(nonlinearity=activation, io_dtype=io_dtype_name(x.dtype)),
            capacity=ExecutionCapacity(max_tokens=tokens, top_k=topk_ids.shape[1], scratch_bound=MAX_SCRATCH_BYTES),
            routing=RoutingSpec(
                id_dtype=str(topk_ids.dtype).removeprefix("torch."), weight_dtype=io_dtype_name(topk_weights.dtype)
            ),
            device=device,
        )

    whole = plan(max(x.shape[0], 1))
    if whole.required_nbytes() <= MAX_SCRATCH_BYTES:
        return whole
    return plan(_launch_tokens(weights, x.shape[0], topk_ids.shape[1]))


def _launch_tokens(weights: WeightPlan, tokens: int, top_k: int) -> int:
    """Tokens of one launch, so that scratch stays within its bound however many there are; a token at least."""
    each = total_bytes(op_by_op_scratch(weights, ExecutionCapacity(max_tokens=1, top_k=top_k)))
    return max(min(tokens, MAX_SCRATCH_BYTES // each), 1)


def _launch(
    binding: Binding, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tell: Progress
) -> torch.Tensor:
    """All tokens, launch by launch; a token's bits do not depend on which others share its launch."""
    y = torch.empty(x.shape, dtype=torch.float32)
    step, device = binding.plan.capacity.max_tokens, binding.experts.device
    for first in range(0, x.shape[0], step):
        part = slice(first, first + step)
        inputs = (tensor[part].to(device) for tensor in (x, topk_ids, topk_weights))
        out = torch.empty(y[part].shape, dtype=y.dtype, device=device)
        y[part] = binding.run(*inputs, out=out, progress=_after(first, x.shape[0], out.shape[0], tell))
    return y


def _after(first: int, tokens: int, share: int, tell: Progress) -> Callable[[int, int], None]:
    """Progress of one launch as progress over all tokens."""
    return lambda done, total: tell("run", first * total + share * done, tokens * total)
