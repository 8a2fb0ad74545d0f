"""Owns the binding of a parallel plan to prepared weights, process groups and scratch, and its run.

It must not know containers.  A run launches kernels and collectives in the order of the current stream; the host waits
for neither, so that a CUDA graph can hold it whole.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from trellis_moe.binding import bind
from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.parallel.collectives import Pending, Ranks
from trellis_moe.parallel.exchange import RowExchange
from trellis_moe.parallel.groups import GridGroups
from trellis_moe.parallel.mapped import MappedRanks
from trellis_moe.parallel.one_shot import OneShot
from trellis_moe.parallel.plan import ParallelPlan
from trellis_moe.parallel.rows import row_tokens
from trellis_moe.parallel.sums import RankOrder
from trellis_moe.scratch import carve, total_bytes
from trellis_moe.session import make_ready
from trellis_moe.specs import IO_DTYPES, check_type
from trellis_prep import PreparedExperts

__all__ = ["ParallelLayer", "bind_parallel"]


class ParallelLayer:
    """A parallel plan, prepared weights, groups and scratch, ready to run; made by `bind_parallel`.

    Attributes:
        plan: of this rank.
        experts: this rank's share.
        groups: None where nothing is exchanged.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        experts: PreparedExperts,
        groups: GridGroups | None,
        arena: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        self.plan, self.experts, self.groups = plan, experts, groups
        make_ready(plan)
        launches = plan.required_nbytes() - sum(-(-buffer.nbytes // 16) * 16 for buffer in plan.buffers)
        self._buffers = carve(arena[launches:], plan.buffers)
        self._binding = bind(plan.execution, experts, arena[:launches], expert_map=expert_map)
        self._one_shot: OneShot | None = None
        self._exchange: RowExchange | None = None
        self._order: RankOrder | None = None
        self._side: torch.cuda.Stream | None = None
        if groups is None:
            return
        groups.world.check_same("what is declared for the layer", plan.declared)
        summed = groups.tensor if plan.splits_rows else groups.world
        if plan.sums_in_order:
            assert summed is not None  # the plan adds over more than two ranks
            carriers: Ranks | MappedRanks = summed
            if plan.mapped_buffers:
                carriers = groups.mapped(summed, total_bytes(plan.mapped_buffers), experts.device)
                self._buffers |= carve(carriers.memory, plan.mapped_buffers)
            self._order = RankOrder(carriers, self._buffers, IO_DTYPES[plan.output_dtype])
            if experts.device.type == "cuda":
                self._side = torch.cuda.Stream(experts.device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._one_shot = groups.one_shot(plan.one_shot_nbytes, experts.device)
        if plan.sums_rows:
            assert groups.expert is not None  # the grid splits experts
            launches_of = tuple((v.path, v.tokens, row_tokens(v)) for v in plan.execution.variants)
            groups.expert.check_same("launches (path, tokens, tokens whose rows exist at once)", launches_of)
            self._exchange = RowExchange(plan, self._binding, groups.expert, arena[:launches], self._buffers)

    @property
    def reads_directly(self) -> bool:
        """Whether small sums are read from peers' memory."""
        return self._one_shot is not None

    @torch.no_grad()
    def run(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, out: torch.Tensor
    ) -> torch.Tensor:
        """Run the routed experts on all ranks; every rank has to call it, with the same tokens.

        Args:
            x: `[tokens, hidden]` in the plan's io dtype.
            topk_ids: `[tokens, top_k] int32 or int64`, ids of the whole layer.
            topk_weights: `[tokens, top_k]`.
            out: in the plan's output dtype, apart from the inputs: `[tokens, hidden]`, for a reduce-scatter
                `[tokens / ranks, hidden]`, the rank's part in the order of ranks.

        Returns:
            `out`.

        Raises:
            MoeTypeError, MoeValueError: as `Binding.run`; also if the ranks do not share out the tokens evenly.
            MoeDistributedError: if a collective fails on the host.
        """
        tokens = self._check(x, out)
        if self.groups is None:
            return self._binding.run(x, topk_ids, topk_weights, out=out)
        if not tokens:
            return out
        if self.plan.splits_rows:
            return self._sum_rows(x, topk_ids, topk_weights, out)
        if self._one_shot is not None and self._one_shot.takes(x.numel(), self._partial_dtype):
            part = self._one_shot.part(tokens, x.shape[1], self._partial_dtype)
            self._binding.run(x, topk_ids, topk_weights, out=part)
            target = self._target(tokens, out)
            self._one_shot.all_reduce(part, target)
            return out if target is out else out.copy_(target)
        if self._order is not None:
            return self._sum_in_order(self._order, x, topk_ids, topk_weights, out)
        return self._sum_parts(x, topk_ids, topk_weights, out)

    @property
    def _partial_dtype(self) -> torch.dtype:
        return IO_DTYPES[self.plan.partial_dtype]

    def _target(self, tokens: int, out: torch.Tensor) -> torch.Tensor:
        """Where partial sums are added: a buffer of theirs, or the result where it has their dtype and shape."""
        return self._buffers["partial"][:tokens] if "partial" in self._buffers else out

    def _sum_parts(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Add the ranks' partial sums, of one piece while the next one is computed."""
        assert self.groups is not None
        world, target = self.groups.world, self._target(x.shape[0], out)
        scatters = self.plan.reduce.collective == "reduce_scatter"
        pending: list[Pending] = []
        for first, end in self._pieces(x.shape[0]):
            piece = slice(first, end)
            self._binding.run(x[piece], topk_ids[piece], topk_weights[piece], out=target[piece])
            if not scatters:
                pending.append(world.all_reduce(target[piece]))
        for work in pending:
            work.wait()
        if scatters:
            return self._scatter(target, out)
        return out if target is out else out.copy_(target)

    def _sum_in_order(
        self,
        order: RankOrder,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Add the ranks' partial sums one rank after the other, of one piece while the next one is computed."""
        partial, size = self._buffers["partial"], self.plan.summed_ranks
        if self.plan.reduce.collective == "reduce_scatter":
            self._binding.run(x, topk_ids, topk_weights, out=partial[: x.shape[0]])
            order.scatter(partial[: x.shape[0]], out)
            return out
        pieces = self._pieces(x.shape[0], size)
        side = self._side if len(pieces) > 1 else None
        for first, end in pieces:
            piece, padded = slice(first, end), slice(first, first + -(-(end - first) // size) * size)
            self._binding.run(x[piece], topk_ids[piece], topk_weights[piece], out=partial[piece])
            if side is None:
                order.add(partial[padded], out[piece])
                continue
            side.wait_stream(torch.cuda.current_stream(self.experts.device))
            with torch.cuda.stream(side):
                order.add(partial[padded], out[piece])
        if side is not None:
            torch.cuda.current_stream(self.experts.device).wait_stream(side)
        return out

    def _scatter(self, target: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert self.groups is not None
        own = self._buffers["own_partial"][: out.shape[0]] if "own_partial" in self._buffers else out
        self.groups.world.reduce_scatter(own, target)
        return out if own is out else out.copy_(own)

    def _sum_rows(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Add single routes over the expert ranks, then their sums over the tensor ranks."""
        assert self.groups is not None
        target = self._target(x.shape[0], out)
        if self._exchange is None:  # a share without channels has no rows
            target.zero_()
        else:
            self._exchange.run(x, topk_ids, topk_weights, target)
        if self._order is not None:
            scatters = self.plan.reduce.collective == "reduce_scatter"
            whole = self._buffers["results"][: x.shape[0]] if scatters else out
            size = self.plan.summed_ranks
            self._order.add(self._buffers["partial"][: -(-x.shape[0] // size) * size], whole)
            target = whole
        elif self.groups.tensor is not None:
            self.groups.tensor.all_reduce(target).wait()
        if self.plan.reduce.collective == "reduce_scatter":
            target = target.tensor_split(self.groups.world.size)[self.groups.rank]
        return out if target is out else out.copy_(target)

    def _pieces(self, tokens: int, grain: int = 1) -> tuple[tuple[int, int], ...]:
        """First and end of each piece, as even as multiples of the grain can be."""
        most = self.plan.reduce.overlap_tokens
        count = 1 if most is None or self.plan.reduce.collective != "all_reduce" else -(-tokens // most)
        cuts = sorted({min(-(-tokens * index // (count * grain)) * grain, tokens) for index in range(count + 1)})
        return tuple(pairwise(cuts))

    def _check(self, x: torch.Tensor, out: torch.Tensor) -> int:
        check_type("x", x, torch.Tensor)
        check_type("out", out, torch.Tensor)
        tokens, hidden = x.shape[0] if x.ndim else 0, self.plan.execution.weights.source.geometry.hidden_size
        rows = tokens
        if self.groups is not None and self.plan.reduce.collective == "reduce_scatter":
            rows, rest = divmod(tokens, self.groups.world.size)
            if rest:
                size = self.groups.world.size
                raise MoeValueError(
                    f"{tokens} tokens cannot be shared out evenly over {size} ranks; nearest: {rows * size} or "
                    f"{(rows + 1) * size}"
                )
        wanted = IO_DTYPES[self.plan.output_dtype]
        if out.dtype != wanted or out.device != self.experts.device:
            raise MoeTypeError(f"out must be {wanted} on {self.experts.device}, got {out.dtype} on {out.device}")
        if list(out.shape) != [rows, hidden] or not out.is_contiguous():
            raise MoeValueError(
                f"out must be {[rows, hidden]} and contiguous, got {list(out.shape)} of strides {out.stride()}"
            )
        if tokens > self.plan.execution.capacity.max_tokens:
            raise MoeValueError(f"{tokens} tokens exceed the plan's {self.plan.execution.capacity.max_tokens}")
        return tokens


def bind_parallel(
    plan: ParallelPlan,
    experts: PreparedExperts,
    groups: GridGroups | None = None,
    scratch: torch.Tensor | None = None,
    *,
    expert_map: torch.Tensor | None = None,
) -> ParallelLayer:
    """Fix the addresses of a layer on one of many ranks; every rank has to call it, in the same order.

    Args:
        plan: of this rank.
        experts: its prepared weights.
        groups: of the plan's grid; not needed where nothing is exchanged.
        scratch: `[bytes] uint8` on the weights' device, at least `plan.required_nbytes()`; None allocates it here.
            Layers that run one after the other may share it.
        expert_map: `[experts] int32 or int64`, of `layer_share`, on any device; None where the rank holds all experts.

    Raises:
        MoeTypeError: if an argument is of another type or on another device than planned.
        MoeValueError: if the groups are of another grid or rank, ranks declare different things, or as `bind`; names
            both.
        MoeDistributedError: if a rank is gone.
        ColdKernelError: if compiling is forbidden and a kernel of the plan is not ready.
    """
    check_type("plan", plan, ParallelPlan)
    check_type("experts", experts, PreparedExperts)
    if plan.is_alone:
        groups = None
    elif groups is None:
        raise MoeValueError(f"the plan is of {plan.grid.world_size} ranks; give the groups of its grid")
    elif groups.grid != plan.grid or groups.rank != plan.rank:
        raise MoeValueError(
            f"the groups are of rank {groups.rank} of {groups.grid}, the plan of rank {plan.rank} of {plan.grid}"
        )
    if scratch is None:
        scratch = torch.empty(plan.required_nbytes(), dtype=torch.uint8, device=experts.device)
    check_type("scratch", scratch, torch.Tensor)
    if scratch.device != experts.device:
        raise MoeTypeError(f"scratch must be on {experts.device}, got {scratch.device}")
    if scratch.numel() < plan.required_nbytes():
        raise MoeValueError(f"scratch has {scratch.numel()} bytes, the plan needs {plan.required_nbytes()}")
    if expert_map is not None:
        expert_map = expert_map.to(experts.device)
    return ParallelLayer(plan, experts, groups, scratch[: plan.required_nbytes()], expert_map)
