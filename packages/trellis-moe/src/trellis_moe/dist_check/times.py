"""Owns the times of a layer on one rank and on all, and the memory that a share takes.  It must not judge them.

A sample is the longest over the ranks of one launch in a replay of a CUDA graph; replays follow each other, so that the
collectives keep the ranks in step.  Launches of few tokens have routes of their own each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from trellis_kernels.bench.timing import Samples, eager_samples
from trellis_moe.bench.presets import Preset
from trellis_moe.bench.record import Recorder
from trellis_moe.dist_check.build import Bound, Request, bind_share, compile_plans, plan_share, run_into
from trellis_moe.dist_check.ranks import Process
from trellis_moe.dist_check.report import MemoryUse
from trellis_moe.dist_check.samples import Routes, noise_weights, random_routes
from trellis_moe.errors import MoeDistributedError
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.parallel.collectives import await_device
from trellis_moe.parallel.groups import GridGroups, open_groups
from trellis_moe.parallel.layer import ParallelLayer
from trellis_moe.parallel.plan import ParallelPlan
from trellis_moe.parallel.reduction import ReduceSpec
from trellis_moe.parallel.share import LayerShare, expert_grid, tensor_grid
from trellis_moe.receipts.schema import Check, ParallelCase
from trellis_moe.specs import IO_DTYPES
from trellis_prep import PreparedExperts, RankGrid

__all__ = ["TIMED", "Timed", "time_layer"]

_IO = "bfloat16"
_BOUND = 4e-3  # relative L2, results rounded to bfloat16
_LAUNCHES = 8  # of a graph of few tokens
_FEW = 64  # tokens
_COMPARED = 1 << 16  # bytes that ranks may take for a moment to compare what they declared, when they bind
_ONE_SHOT = 1 << 20


@dataclass(frozen=True)
class Timed:
    """One way to share a layer out that is timed.

    Attributes:
        scheme: `tp` or `ep`.
        name: of the reduction.
        reduce: of the plan.
        counts: whether a token count is worth it.
    """

    scheme: str
    name: str
    reduce: ReduceSpec
    counts: Callable[[int], bool] = lambda _tokens: True


TIMED = (
    Timed("tp", "float32", ReduceSpec()),
    Timed("tp", _IO, ReduceSpec(dtype=_IO)),
    Timed("tp", "float32, direct reads", ReduceSpec(one_shot_bytes=_ONE_SHOT), lambda tokens: tokens <= _FEW),
    Timed("tp", f"{_IO}, direct reads", ReduceSpec(dtype=_IO, one_shot_bytes=_ONE_SHOT), lambda tokens: tokens <= _FEW),
    Timed("tp", "float32, pieces of 4096", ReduceSpec(overlap_tokens=4096), lambda tokens: tokens > 4096),
    Timed("tp", "float32, pieces of 2048", ReduceSpec(overlap_tokens=2048), lambda tokens: tokens > 2048),
    Timed("tp", f"{_IO}, pieces of 4096", ReduceSpec(dtype=_IO, overlap_tokens=4096), lambda tokens: tokens > 4096),
    Timed("ep", "rows in slot order", ReduceSpec()),
    Timed("ep", f"partial sums in {_IO}", ReduceSpec(dtype=_IO, experts="partial")),
    Timed(
        "ep",
        f"partial sums in {_IO}, pieces of 4096",
        ReduceSpec(dtype=_IO, experts="partial", overlap_tokens=4096),
        lambda tokens: tokens > 4096,
    ),
    Timed("tp", "float32, copies", ReduceSpec(transport="copies"), lambda tokens: tokens > _FEW),
    Timed(
        "tp",
        "float32, copies of pieces of 2048",
        ReduceSpec(transport="copies", overlap_tokens=2048),
        lambda tokens: tokens > 2048,
    ),
    Timed(
        "tp",
        f"{_IO}, copies of pieces of 4096",
        ReduceSpec(dtype=_IO, transport="copies", overlap_tokens=4096),
        lambda tokens: tokens > 4096,
    ),
)
"""Every way that is timed."""


def time_layer(
    process: Process, preset: Preset, token_counts: Sequence[int], *, samples: int, recorder: Recorder | None
) -> tuple[MemoryUse, ...]:
    """Time a layer on one rank, then shared out over all in every way; all ranks take part.

    Args:
        process: this rank.
        preset: the layer.
        token_counts: of the runs.
        samples: of each row.
        recorder: gets the rows, on the first rank.

    Returns:
        Memory of this rank's shares.

    Raises:
        MoeDistributedError: if a rank is gone.
    """
    _inputs.cache_clear()
    source = preset.source()
    request = Request(
        source, noise_weights(source), tuple(sorted(token_counts)), preset.top_k, _IO, _IO, process.device
    )
    grids = {"ep": expert_grid(source, process.world), "tp": tensor_grid(source, process.world)}
    ways = tuple(way for way in TIMED if process.captures or way.reduce.transport == "group")
    ways = ways if process.world > 1 else ()
    planned = [plan_share(request, grids[way.scheme], process.rank, way.reduce) for way in ways]
    alone = plan_share(request)
    compile_plans([plan for _, plan in (alone, *planned)])
    wanted: dict[int, torch.Tensor] = {}
    whole = bind_share(*alone)
    one = Timed("tp", "none", ReduceSpec())
    for tokens in request.token_counts:
        wanted[tokens] = _row(process, preset, request, one, whole, tokens, None, samples, recorder, ranks=1)
    del whole
    used: list[MemoryUse] = []
    for scheme, grid in grids.items():
        shares = [(way, *it) for way, it in zip(ways, planned, strict=True) if way.scheme == scheme]
        if not shares:
            continue
        used.append(_memory(process, preset, shares[0][1:], scheme, request, grid))
        _time_scheme(process, preset, request, shares, open_groups(grid), wanted, samples, recorder)
    return tuple(used)


def _time_scheme(
    process: Process,
    preset: Preset,
    request: Request,
    shares: Sequence[tuple[Timed, LayerShare, ParallelPlan]],
    groups: GridGroups,
    wanted: dict[int, torch.Tensor],
    samples: int,
    recorder: Recorder | None,
) -> None:
    """Time every way to share a layer out by one grid."""
    experts: PreparedExperts = prepare_weights(
        shares[0][2].execution.weights, shares[0][1].weights, device=process.device
    )
    for way, share, plan in shares:
        try:
            bound = bind_share(share, plan, groups, experts)
        except MoeDistributedError as error:
            if way.reduce.transport == "group":
                raise
            if recorder is not None:
                recorder.skip(f"{preset.key}, {way.name}", str(error))
            continue
        if way.reduce.one_shot_bytes and not bound.layer.reads_directly:
            if recorder is not None:
                recorder.skip(f"{preset.key}, {way.name}", "the ranks cannot read each other's memory")
            continue
        for tokens in filter(way.counts, request.token_counts):
            _row(process, preset, request, way, bound, tokens, wanted[tokens], samples, recorder, ranks=process.world)


def _row(
    process: Process,
    preset: Preset,
    request: Request,
    way: Timed,
    bound: Bound,
    tokens: int,
    wanted: torch.Tensor | None,
    samples: int,
    recorder: Recorder | None,
    *,
    ranks: int,
) -> torch.Tensor:
    """Time one way at one token count, check its first result and record it; the result."""
    launches = _LAUNCHES if tokens <= _FEW and process.device.type == "cuda" else 1
    inputs = [_inputs(request, tokens, seed) for seed in range(launches)]
    out = torch.empty(tokens, preset.hidden, dtype=IO_DTYPES[_IO], device=process.device)
    found = run_into(bound, inputs[0], out).clone()
    what = f"{preset.key}, {tokens} tokens, {way.scheme}{ranks} {way.name}"
    await_device(process.device, seconds=process.timeout, what=what)
    taken = _samples(process, bound.layer, inputs, out, samples, what)
    slowest = _slowest(process, taken) if ranks > 1 else taken
    if recorder is None:
        return found
    reference = found if wanted is None else wanted
    error = float((found.double() - reference.double()).norm() / reference.double().norm())
    hit = len(set(inputs[0].ids.flatten().tolist()))
    case = ParallelCase(
        geometry=preset.name,
        codebook=preset.codebook,
        k=preset.k,
        tokens=tokens,
        scheme="tp" if way.scheme == "tp" else "ep",
        ranks=ranks,
        reduce=way.name,
        mode="graph" if process.device.type == "cuda" else "eager",
    )

    def record() -> None:
        recorder.add_row(
            case,
            slowest,
            nbytes=request.source.code_bytes() * hit // preset.experts,
            flops=2 * tokens * preset.top_k * preset.weights_per_expert,
            weights=hit * preset.weights_per_expert,
            check=Check(reference="one rank", error=error, bound=_BOUND),
        )

    recorder.attempt(what, record)
    return found


@lru_cache(maxsize=32)  # every way runs the same inputs, and large ones take long to draw
def _inputs(request: Request, tokens: int, seed: int) -> Routes:
    dtype = IO_DTYPES[request.io_dtype]
    return random_routes(request.source, tokens, request.top_k, dtype=dtype, device=request.device, seed=seed)


def _samples(
    process: Process, layer: ParallelLayer, inputs: Sequence[Routes], out: torch.Tensor, count: int, what: str
) -> Samples:
    def launch_all() -> None:
        for routes in inputs:
            layer.run(routes.x, routes.ids, routes.weights, out=out)

    if process.device.type != "cuda":
        return eager_samples([launch_all], device=process.device, count=count, warm_ups=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads watch the collectives
        launch_all()
    graph.replay()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(count + 2)]  # type: ignore[no-untyped-call]  # untyped in torch
    for event in events:
        graph.replay()
        event.record()
    await_device(process.device, seconds=process.timeout, what=what)
    spans = [begin.elapsed_time(end) for begin, end in pairwise(events[1:])]
    return Samples(tuple(max(round(span * 1e6 / len(inputs)), 1) for span in spans))


def _slowest(process: Process, samples: Samples) -> Samples:
    """Each sample's longest over the ranks."""
    times = torch.tensor(samples.nanoseconds, dtype=torch.int64, device=process.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return Samples(tuple(times.tolist()))


def _memory(process: Process, preset: Preset, planned: Any, scheme: str, request: Request, grid: RankGrid) -> MemoryUse:
    """Prepare, bind and run a share once while nothing else is allocated, and see what that took."""
    share, plan = planned
    routes = _inputs(request, max(request.token_counts), 0)
    out = torch.empty(routes.x.shape, dtype=IO_DTYPES[_IO], device=process.device)
    groups = open_groups(grid)
    on_gpu = process.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _requested(on_gpu, "current")
    bound = bind_share(share, plan, groups)
    allocated = _requested(on_gpu, "current") - before
    run_into(bound, routes, out)
    await_device(process.device, seconds=process.timeout, what=f"{preset.key}, memory")
    peak = _requested(on_gpu, "peak") - before
    planned_bytes = plan.execution.weights.required_nbytes() + plan.required_nbytes() + plan.own_nbytes
    ok = not on_gpu or planned_bytes <= peak <= planned_bytes + _COMPARED
    return MemoryUse(
        layer=f"{preset.key} {scheme}{process.world}",
        rank=process.rank,
        planned_bytes=planned_bytes,
        allocated_bytes=max(allocated, 0),
        peak_bytes=max(peak, 0),
        ok=ok,
    )


def _requested(on_gpu: bool, which: str) -> int:
    """Bytes that tensors asked for; what torch's allocator rounds them up to follows its blocks, and no plan."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]) if on_gpu else 0
