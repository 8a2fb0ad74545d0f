"""Owns one layer's way from a checkpoint to an output, timed: open, describe, plan, prepare, bind, run.

It must not print.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trellis_format.activations import ACTIVATIONS, Activation
from trellis_format.checkpoint import CONFIG_NAME
from trellis_format.files.strict_json import read_json
from trellis_format.findings import Findings
from trellis_format.inspect_model import compare_sizes
from trellis_format.layer_source import open_layer_source, stated_activation
from trellis_format.model_config import parse_model_config
from trellis_format.source import ExpertGeometry, TrellisSource, TrellisWeights
from trellis_moe.binding import Binding, bind
from trellis_moe.commands.files import check_path
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
    """A described layer; `warnings` say where `config.json` disagrees with its tensors, which are taken."""

    source: TrellisSource
    weights: TrellisWeights
    open_seconds: float
    warnings: tuple[str, ...] = ()


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
    checkpoint: str | os.PathLike[str],
    layer: int,
    *,
    activation: Activation | str | None = None,
    pattern: str | None = None,
    ignore_index: bool = False,
) -> Layer:
    """Open and describe one layer.

    Args:
        checkpoint: its directory, of any container.
        layer: index of the layer.
        activation: overrides what `config.json` or a manifest says.  Of a name, the constants are those that the
            checkpoint states for this law, else those of `Activation.named`.
        pattern: regular expression of expert names in EXL3.
        ignore_index: do not compare EXL3 shards with the index.

    Raises:
        FormatError: if the checkpoint or the layer breaks a rule.
        MoeValueError: if no activation is known, or its gate does not fit the experts.
    """
    begin = time.perf_counter()
    path = Path(checkpoint)
    check_path(path)
    source, weights = open_layer_source(
        path,
        layer,
        pattern=pattern,
        activation=activation,
        ignore_index=ignore_index,
    )
    _check_law(path, layer, source)
    return Layer(source, weights, time.perf_counter() - begin, _disagreements(path, layer, source.geometry))


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


def _check_law(checkpoint: Path, layer: int, source: TrellisSource) -> None:
    law, gated = source.activation, source.geometry.gated
    if law is None:
        file = checkpoint / CONFIG_NAME
        fact = f"{checkpoint}: there is no {CONFIG_NAME} to state the activation"
        if file.exists():
            fact = f"{file}: {stated_activation(checkpoint)}, no activation that is known"
        raise MoeValueError(f"{fact}; give --activation, one of {', '.join(ACTIVATIONS)}")
    if law.gated != gated:
        fitting = " or ".join(kind for kind in ACTIVATIONS if Activation(kind).gated == gated)
        raise MoeValueError(
            f"{checkpoint}: layer {layer}: activation {law.kind} takes {'a' if law.gated else 'no'} gate, the experts "
            f"have {'a' if gated else 'no'} gate; --activation must be {fitting}"
        )


def _disagreements(checkpoint: Path, layer: int, geometry: ExpertGeometry) -> tuple[str, ...]:
    """Where `config.json`, which opening has read and accepted, states other sizes than the tensors have."""
    file = checkpoint / CONFIG_NAME
    if not file.exists():
        return ()
    findings = Findings()
    compare_sizes(file, layer, "", geometry, parse_model_config(read_json(file), file=str(file)), findings)
    return tuple(f"{finding.file}: {finding.message}" for finding in findings.collected())


def _plan(
    weights: WeightPlan,
    activation: Activation,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    device: torch.device,
) -> ExecutionPlan:
    """A run over all tokens, cut into launches whose scratch stays within its bound; one of a token at least."""
    top_k = topk_ids.shape[1]
    bound = max(MAX_SCRATCH_BYTES, total_bytes(op_by_op_scratch(weights, 1, top_k)))
    return plan_execution(
        weights,
        activation=ActivationSpec(nonlinearity=activation, io_dtype=io_dtype_name(x.dtype)),
        capacity=ExecutionCapacity(max_tokens=max(x.shape[0], 1), top_k=top_k, scratch_bound=bound),
        routing=RoutingSpec(
            id_dtype=str(topk_ids.dtype).removeprefix("torch."), weight_dtype=io_dtype_name(topk_weights.dtype)
        ),
        device=device,
    )


def _launch(
    binding: Binding, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tell: Progress
) -> torch.Tensor:
    device = binding.experts.device
    inputs = (tensor.contiguous().to(device) for tensor in (x, topk_ids, topk_weights))
    out = torch.empty(x.shape, dtype=torch.float32, device=device)
    return binding.run(*inputs, out=out, progress=lambda done, total: tell("run", done, total)).cpu()
