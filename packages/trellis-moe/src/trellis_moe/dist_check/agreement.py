"""Owns the comparison of ranks with one rank: every way to share a layer out, token count, and mode of launch.

It must not time.  Bounds come from the arithmetic:

    experts, ordered   no bit differs
    everything else    1e-3 relative L2.  A share's sums add the same products in another order, which moves a float32
                       sum by a few units in its last place; where such a sum lies next to a border of float16, down's
                       operand then differs by one unit there, which is 2^-11 of it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trellis_format.extent import TrellisExtent
from trellis_moe.dist_check.build import Bound, Request, bind_share, compile_plans, plan_share, run_into
from trellis_moe.dist_check.ranks import Process
from trellis_moe.dist_check.report import Agreement
from trellis_moe.dist_check.samples import Routes, random_routes
from trellis_moe.errors import MoeDistributedError
from trellis_moe.parallel.collectives import await_device
from trellis_moe.parallel.groups import GridGroups, open_groups
from trellis_moe.parallel.reduction import ReduceSpec
from trellis_moe.parallel.share import expert_grid, tensor_grid
from trellis_moe.specs import IO_DTYPES
from trellis_prep import RankGrid

__all__ = ["SUM_BOUND", "Way", "check_agreement", "ways_to_share"]

SUM_BOUND = 1e-3
"""Relative L2 of sums over ranks to those of one rank."""
_ONE_SHOT_BYTES = 1 << 20
_PIECES = 4


@dataclass(frozen=True)
class Way:
    """One way to share a layer out.

    Attributes:
        name: for the report.
        grid: who holds what.
        reduce: how results become one.
        exact: whether the bits are those of one rank.
    """

    name: str
    grid: RankGrid
    reduce: ReduceSpec
    exact: bool = False


def ways_to_share(request: Request, world: int, *, mapping: bool = False) -> tuple[Way, ...]:
    """Every way that so many ranks allow, ranks without a share among them.

    Args:
        request: the layer and its runs.
        world: ranks.
        mapping: whether they have a GPU each, and may map each other's memory.
    """
    source, most = request.source, max(request.token_counts)
    geometry = source.geometry
    whole = TrellisExtent.whole(geometry.padded_intermediate_size)
    nothing = TrellisExtent(
        global_intermediate_size=geometry.padded_intermediate_size, first_slot=whole.slot_count, slot_count=0
    )
    lone_channels = RankGrid((whole, *[nothing] * (world - 1)), (range(geometry.num_experts),))
    nobody = range(geometry.num_experts, geometry.num_experts)
    lone_experts = RankGrid((whole,), (range(geometry.num_experts), *[nobody] * (world - 1)))
    tensor, expert = tensor_grid(source, world), expert_grid(source, world)
    ways = [
        Way("tp", tensor, ReduceSpec()),
        Way("tp in the io dtype", tensor, ReduceSpec(dtype=request.output_dtype)),
        Way("tp in pieces", tensor, ReduceSpec(overlap_tokens=max(most // _PIECES, 1))),
        Way("tp by direct reads", tensor, ReduceSpec(one_shot_bytes=_ONE_SHOT_BYTES)),
        Way("tp scattered", tensor, ReduceSpec(collective="reduce_scatter")),
        Way("tp, channels on one rank", lone_channels, ReduceSpec()),
        Way("ep", expert, ReduceSpec(), exact=True),
        Way("ep, experts on one rank", lone_experts, ReduceSpec(), exact=True),
        Way("ep by partial sums", expert, ReduceSpec(experts="partial")),
    ]
    if mapping:
        ways.append(Way("tp by copies", tensor, ReduceSpec(transport="copies")))
        pieces = ReduceSpec(transport="copies", overlap_tokens=max(most // _PIECES, 1))
        ways.append(Way("tp by copies in pieces", tensor, pieces))
    if world > 2:
        ways.append(Way("tp in any order", tensor, ReduceSpec(order="any")))
    if world >= 4 and world % 2 == 0:
        grid = expert_grid(source, 2, world // 2)
        ways += [
            Way("tp x ep", grid, ReduceSpec()),
            Way("tp x ep scattered", grid, ReduceSpec(collective="reduce_scatter")),
        ]
    return tuple(ways)


def check_agreement(process: Process, request: Request, *, graphs: bool) -> Iterator[Agreement]:
    """Compare every way with one rank that holds everything; all ranks take part.

    Args:
        process: this rank.
        request: the layer and its runs.
        graphs: whether to compare replays of CUDA graphs, too.

    Yields:
        One result for each way, token count and mode, of this rank.

    Raises:
        MoeDistributedError: if a rank is gone.
    """
    ways = ways_to_share(request, process.world, mapping=process.captures) if process.world > 1 else ()
    planned = [plan_share(request, way.grid, process.rank, way.reduce) for way in ways]
    alone = plan_share(request)
    compile_plans([plan for _, plan in (alone, *planned)])
    reference = bind_share(*alone)
    inputs = {tokens: _inputs(request, tokens) for tokens in request.token_counts}
    wanted = {tokens: run_into(reference, routes, _out(request, routes)) for tokens, routes in inputs.items()}
    opened: list[tuple[RankGrid, GridGroups]] = []
    for way, (share, plan) in zip(ways, planned, strict=True):
        groups = next((found for grid, found in opened if grid == way.grid), None)
        if groups is None:
            groups = open_groups(way.grid)
            opened.append((way.grid, groups))
        try:
            bound = bind_share(share, plan, groups)
        except MoeDistributedError as error:
            if way.reduce.transport == "group":
                raise
            process.say(f"{way.name}: left out: {error}")  # said by every rank, after they agreed on it
            continue
        if way.reduce.one_shot_bytes and not bound.layer.reads_directly:
            process.say(f"{way.name}: left out: the ranks cannot read each other's memory")
            continue
        for tokens, routes in inputs.items():
            if way.reduce.collective == "reduce_scatter" and tokens % process.world:
                continue
            yield from _compare(process, request, way, bound, routes, wanted[tokens], graphs=graphs)


def _inputs(request: Request, tokens: int) -> Routes:
    dtype = IO_DTYPES[request.io_dtype]
    return random_routes(request.source, tokens, request.top_k, dtype=dtype, device=request.device, seed=tokens)


def _out(request: Request, routes: Routes, parts: int = 1) -> torch.Tensor:
    shape = (routes.x.shape[0] // parts, routes.x.shape[1])
    return torch.empty(shape, dtype=IO_DTYPES[request.output_dtype], device=request.device)


def _compare(
    process: Process,
    request: Request,
    way: Way,
    bound: Bound,
    routes: Routes,
    wanted: torch.Tensor,
    *,
    graphs: bool,
) -> Iterator[Agreement]:
    scatters = way.reduce.collective == "reduce_scatter"
    parts = process.world if scatters else 1
    wanted = wanted.tensor_split(parts)[process.rank if scatters else 0]
    out = run_into(bound, routes, _out(request, routes, parts))
    what = f"{way.name}, {routes.x.shape[0]} tokens"
    await_device(request.device, seconds=process.timeout, what=what)
    eager = out.clone()
    yield _agreement(process, way, routes, "eager", eager, wanted)
    if not graphs:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads watch the collectives
        bound.layer.run(routes.x, routes.ids, routes.weights, out=out)
    out.fill_(float("nan"))
    graph.replay()
    await_device(request.device, seconds=process.timeout, what=f"{what}, replayed")
    yield _agreement(process, way, routes, "graph", out, wanted, same=torch.equal(out, eager))


def _agreement(
    process: Process,
    way: Way,
    routes: Routes,
    mode: str,
    found: torch.Tensor,
    wanted: torch.Tensor,
    *,
    same: bool = True,
) -> Agreement:
    norm = float(wanted.double().norm())
    error = float((found.double() - wanted.double()).norm()) / norm if norm else float(found.double().norm())
    equal = bool(torch.equal(found, wanted))
    ok = same and (equal if way.exact else error <= SUM_BOUND)
    return Agreement(
        way=way.name, rank=process.rank, tokens=routes.x.shape[0], mode=mode, error=error, equal=equal, ok=ok
    )
