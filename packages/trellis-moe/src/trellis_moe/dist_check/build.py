"""Owns a rank's way from a layer to a bound share of it.  It must not measure or compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trellis_format.source import TrellisSource, TrellisWeights
from trellis_kernels.cute import compiler
from trellis_moe.dist_check.samples import Routes
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.parallel.groups import GridGroups
from trellis_moe.parallel.layer import ParallelLayer, bind_parallel
from trellis_moe.parallel.plan import ParallelPlan, plan_parallel
from trellis_moe.parallel.reduction import ReduceSpec
from trellis_moe.parallel.share import LayerShare, layer_share, tensor_grid
from trellis_moe.specs import ActivationSpec, ExecutionCapacity
from trellis_prep import PreparedExperts, RankGrid

__all__ = ["Bound", "Request", "bind_share", "compile_plans", "plan_share", "run_into"]

_JOBS = 8  # processes that compile, of each rank


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be run.

    Attributes:
        source: the whole layer.
        weights: its arrays.
        token_counts: of the runs.
        top_k: routes of a token.
        io_dtype: of x.
        output_dtype: of the result.
        device: of this rank.
    """

    source: TrellisSource
    weights: TrellisWeights
    token_counts: tuple[int, ...]
    top_k: int
    io_dtype: str
    output_dtype: str
    device: torch.device


@dataclass(frozen=True, eq=False)
class Bound:
    """A share ready to run.

    Attributes:
        share: what the rank holds.
        layer: the bound layer.
    """

    share: LayerShare
    layer: ParallelLayer


def plan_share(
    request: Request, grid: RankGrid | None = None, rank: int = 0, reduce: ReduceSpec | None = None
) -> tuple[LayerShare, ParallelPlan]:
    """A rank's share and plan; without a grid, those of one rank that holds everything."""
    grid = grid or tensor_grid(request.source, 1)
    share = layer_share(request.source, request.weights, grid, rank)
    assert request.source.activation is not None  # the check's own layers state it
    plan = plan_parallel(
        share,
        grid,
        rank,
        activation=ActivationSpec(
            nonlinearity=request.source.activation, io_dtype=request.io_dtype, output_dtype=request.output_dtype
        ),
        capacity=ExecutionCapacity(
            max_tokens=max(request.token_counts), top_k=request.top_k, token_counts=request.token_counts
        ),
        reduce=reduce,
        device=request.device,
    )
    return share, plan


def compile_plans(plans: Sequence[ParallelPlan]) -> int:
    """Compile all kernels of some plans, several at a time; how many there are."""
    keys = tuple(dict.fromkeys(key for plan in plans for key in plan.compile_keys()))
    compiler.precompile(keys, jobs=_JOBS)
    return len(keys)


def bind_share(
    share: LayerShare,
    plan: ParallelPlan,
    groups: GridGroups | None = None,
    experts: PreparedExperts | None = None,
    scratch: torch.Tensor | None = None,
) -> Bound:
    """Prepare a share, unless that was done, and bind it; scratch begins with every bit set."""
    device = plan.execution.device_type
    if experts is None:
        experts = prepare_weights(plan.execution.weights, share.weights, device=_place(device))
    if scratch is None:
        scratch = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8, device=experts.device)
    return Bound(share, bind_parallel(plan, experts, groups, scratch, expert_map=share.expert_map))


def run_into(bound: Bound, routes: Routes, out: torch.Tensor) -> torch.Tensor:
    """Run into a poisoned output."""
    out.fill_(float("nan"))
    return bound.layer.run(routes.x, routes.ids, routes.weights, out=out)


def _place(device_type: str) -> torch.device:
    """The device of this rank: the current one of its type."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
