"""Owns `trellis-moe run`: one layer of a checkpoint over an input file.  It must not parse arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trellis_moe.commands.files import check_output_path, read_input, write_output
from trellis_moe.commands.layer import Layer, LayerRun, choose_device, open_layer, run_layer
from trellis_moe.commands.progress import progress_bar
from trellis_prep import rank_extent

__all__ = ["RunRequest", "describe_run", "run"]

RUN_SCHEMA = "trellis-moe/run"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunRequest:
    """The arguments of one run."""

    checkpoint: Path
    layer: int
    input: Path
    output: Path
    device: str | None = None
    rank: int = 0
    world_size: int = 1
    activation: str | None = None
    pattern: str | None = None
    ignore_index: bool = False


def run(
    request: RunRequest, *, show_progress: bool = True, warn: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Carry out a run; every argument and input is checked before any weight is read.

    Args:
        request: what to run.
        show_progress: whether a bar may be shown.
        warn: called, before the work begins, with each warning that the report will have.

    Returns:
        The report: geometry, rates, law, share, bytes, path, warnings, seconds.

    Raises:
        FormatError, PrepError, MoeError: if something is refused; nothing is written.
    """
    device = choose_device(request.device)
    check_output_path(request.output, source=request.input, checkpoint=request.checkpoint)
    layer = open_layer(
        request.checkpoint,
        request.layer,
        activation=request.activation,
        pattern=request.pattern,
        ignore_index=request.ignore_index,
    )
    geometry = layer.source.geometry
    rank_extent(geometry.padded_intermediate_size, request.rank, request.world_size)
    data = read_input(request.input, hidden_size=geometry.hidden_size, num_experts=geometry.num_experts)
    if warn is not None:
        for warning in layer.warnings:
            warn(warning)
    with progress_bar(show_progress) as tell:
        result = run_layer(
            layer,
            data.x,
            data.topk_ids,
            data.topk_weights,
            device=device,
            rank=request.rank,
            world_size=request.world_size,
            progress=tell,
        )
    write_output(request.output, result.y)
    report = {
        "schema": RUN_SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "checkpoint": str(request.checkpoint),
        "layer": request.layer,
        "output": str(request.output),
        "tp_rank": request.rank,
        "tp_size": request.world_size,
    }
    return report | describe_run(layer, result)


def describe_run(layer: Layer, result: LayerRun) -> dict[str, Any]:
    """The part of a report that every run has."""
    source, plan = layer.source, result.plan
    geometry, extent, law = source.geometry, plan.weights.extent, plan.activation.nonlinearity
    return {
        "geometry": {
            "num_experts": geometry.num_experts,
            "hidden_size": geometry.hidden_size,
            "intermediate_size": geometry.intermediate_size,
            "padded_hidden_size": geometry.padded_hidden_size,
            "padded_intermediate_size": geometry.padded_intermediate_size,
            "projections": [projection.value for projection in geometry.projections],
        },
        "codebook": source.codebook,
        "rates": [rate.bits for rate in source.rates.distinct()],
        "activation": law.kind,
        "activation_constants": {
            "limit": None if math.isinf(law.limit) else law.limit,
            "alpha": law.alpha,
            "beta": law.beta,
        },
        "io_dtype": plan.activation.io_dtype,
        "channels": [extent.first_channel, extent.end_channel],
        "tokens": result.y.shape[0],
        "non_finite_tokens": int((~torch.isfinite(result.y)).any(dim=1).sum()),
        "top_k": plan.capacity.top_k,
        "device": str(result.experts.device),
        "path": dict(plan.variant_for(result.y.shape[0]).backends),
        "prepared_bytes": result.experts.nbytes,
        "code_bytes": result.experts.layout.code_bytes,
        "scratch_bytes": plan.required_nbytes(),
        "warnings": list(layer.warnings),
        "seconds": {
            "open": layer.open_seconds,
            "prepare": result.prepare_seconds,
            "run": result.run_seconds,
        },
    }
