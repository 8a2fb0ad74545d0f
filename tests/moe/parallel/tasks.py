"""Owns what the ranks of the tests do: one layer, shared out and reduced in every way.  It must not assert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe.samples import Layer, Routes, bits, make_layer, make_routes
from trellis_format.layer_source import open_layer_source
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.module import TrellisMoE
from trellis_moe.parallel import (
    ReduceSpec,
    bind_parallel,
    exchange,
    expert_grid,
    layer_share,
    open_groups,
    plan_parallel,
)
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec, io_dtype_name

DIGESTS = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A grid and a reduction; the name is the case's.

    Rows beyond `small_rows` bytes are shared out by tokens.  Tokens may be run backwards and turned round again.
    """

    name: str
    expert_size: int = 1
    reduce: ReduceSpec = ReduceSpec()  # noqa: RUF009  # frozen
    small_rows: int = exchange.SMALL_ROWS_BYTES
    backwards: bool = False


def open_case_layer(where: tuple[Path, int] | None) -> Layer:
    """A layer of a checkpoint, by its index, or where there is none, one of noise with nine blocks."""
    if where is None:
        return make_layer(experts=3, hidden=120, intermediate=9 * 128, rates=("2", "3", "4"), biased=True)
    return Layer(*open_layer_source(*where))


def routes_of(layer: Layer, tokens: int, dtype: torch.dtype) -> Routes:
    """Routes of top 2 or, where there are as many experts, 3."""
    return make_routes(layer, tokens, min(3, layer.source.geometry.num_experts), dtype=dtype)


def run_cases(
    rank: int, world: int, where: tuple[Path, int] | None, tokens: int, dtype: torch.dtype, cases: Sequence[Case]
) -> DIGESTS:
    """Run a layer once for each case, from poisoned scratch and output.

    Returns:
        By the case's name the result on this rank; `whole`, on the first rank, is that of one that holds everything.
    """
    layer = open_case_layer(where)
    routes = routes_of(layer, tokens, dtype)
    found: DIGESTS = {}
    for case in cases:
        given = routes.part(torch.arange(tokens - 1, -1, -1)) if case.backwards else routes
        y = run_case(rank, world, layer, given, case)
        found[case.name] = y.flip(0) if case.backwards else y
    if rank == 0:
        found["whole"] = run_case(0, 1, layer, routes, Case("whole"))
    return found


def run_case(
    rank: int, world: int, layer: Layer, routes: Routes, case: Case, capacity: ExecutionCapacity | None = None
) -> torch.Tensor:
    """One case; a world of one opens no group.  The capacity is that of the routes where none is given."""
    assert layer.source.activation is not None
    exchange.SMALL_ROWS_BYTES = case.small_rows
    tokens, top_k = routes.ids.shape
    grid = expert_grid(layer.source, case.expert_size, world // case.expert_size)
    share = layer_share(layer.source, layer.weights, grid, rank)
    plan = plan_parallel(
        share,
        grid,
        rank,
        activation=ActivationSpec(
            nonlinearity=layer.source.activation,
            io_dtype=io_dtype_name(routes.x.dtype),
            output_dtype=io_dtype_name(routes.x.dtype),
        ),
        capacity=capacity or ExecutionCapacity(max_tokens=max(tokens, 1), top_k=top_k),
        reduce=case.reduce,
        routing=RoutingSpec(),
    )
    experts = prepare_weights(plan.execution.weights, share.weights)
    scratch = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8)
    groups = open_groups(grid) if world > 1 else None
    bound = bind_parallel(plan, experts, groups, scratch, expert_map=share.expert_map)
    rows = tokens // world if case.reduce.collective == "reduce_scatter" else tokens
    out = torch.full((rows, routes.x.shape[1]), float("nan"), dtype=routes.x.dtype)
    assert bound.run(routes.x, routes.ids, routes.weights, out=out) is out
    again = torch.full_like(out, float("nan"))
    bound.run(routes.x, routes.ids, routes.weights, out=again)
    assert bits(out) == bits(again)
    return out


def run_modules(rank: int, world: int, where: tuple[Path, int] | None, tokens: int) -> DIGESTS:
    """A layer as a module: shared out by the group, by experts, and through torch.compile."""
    layer = open_case_layer(where)
    routes = routes_of(layer, tokens, torch.bfloat16)
    capacity = ExecutionCapacity(max_tokens=tokens, top_k=routes.ids.shape[1])
    grid = expert_grid(layer.source, world)
    import torch.distributed as dist

    arguments = (routes.x, routes.ids.int(), routes.weights.bfloat16())
    tensor = TrellisMoE(*_pair(layer), capacity=capacity, device="cpu", group=dist.group.WORLD)
    expert = TrellisMoE(
        *_pair(layer), capacity=capacity, device="cpu", group=dist.group.WORLD, experts=grid.share(rank).experts
    )
    whole = TrellisMoE(*_pair(layer), capacity=capacity, device="cpu")
    compiled = torch.compile(expert, fullgraph=True, backend="aot_eager")
    return {
        "tensor": tensor(*arguments),
        "expert": expert(*arguments),
        "compiled": compiled(*arguments),
        "whole": whole(*arguments),
    }


def _pair(layer: Layer) -> tuple[object, object]:
    return layer.source, layer.weights
