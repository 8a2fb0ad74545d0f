"""Owns the plan of a layer on many ranks: one rank's launches, what its ranks exchange, and every byte of both.

It must not know process groups, and touches no device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.op_keys import ReduceKey
from trellis_kernels.layers import DeviceLimits
from trellis_moe.errors import MoeUnsupportedError, MoeValueError
from trellis_moe.parallel.reduction import ReduceSpec
from trellis_moe.parallel.rows import FEW, row_bytes, row_tokens
from trellis_moe.parallel.share import LayerShare
from trellis_moe.plan import ExecutionPlan, plan_execution, plan_weights
from trellis_moe.scratch import ScratchBuffer, total_bytes
from trellis_moe.specs import IO_DTYPES, ActivationSpec, ExecutionCapacity, RoutingSpec
from trellis_prep import RankGrid

__all__ = ["SMALL_ROWS_BYTES", "ParallelPlan", "plan_parallel"]

SMALL_ROWS_BYTES = 4 << 20
"""Rows of routes up to so many bytes are added up on every rank, more are shared out by tokens first.

The first is one collective and the second two, with half the bytes and the sum split over the ranks.
"""
_MAPPED = ("parts", "results")
_CHUNK = 8  # channels that a lane of the ordered sum stores at once


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Everything about the runs of a layer on one of many ranks but addresses.

    Args:
        grid: who holds what.
        rank: of this plan in the grid.
        reduce: how the ranks' outputs become one.
        output_dtype: of the result, a key of `IO_DTYPES`.
        execution: this rank's launches; its output is the rank's partial sum, in the dtype in which those are added.
    """

    grid: RankGrid
    rank: int
    reduce: ReduceSpec
    output_dtype: str
    execution: ExecutionPlan

    @property
    def is_alone(self) -> bool:
        """Whether nothing is exchanged."""
        return self.grid.world_size == 1 or self.reduce.collective == "none"

    @property
    def splits_rows(self) -> bool:
        """Whether the rows of a token's routes are added over ranks in slot order."""
        return self.grid.expert_size > 1 and self.reduce.experts == "ordered" and not self.is_alone

    @property
    def sums_rows(self) -> bool:
        """Whether this rank takes part in that: whether it has channels."""
        return self.splits_rows and self.execution.weights.extent.width > 0

    @property
    def declared(self) -> tuple[object, ...]:
        """What all ranks must have declared alike."""
        plan = self.execution
        capacity = replace(plan.capacity, route_experts=None)  # a rank that holds all experts needs no map
        return self.grid, self.reduce, self.output_dtype, plan.activation, plan.routing, capacity

    @property
    def partial_dtype(self) -> str:
        """Of this rank's partial sum."""
        return self.execution.activation.output_dtype

    @property
    def buffers(self) -> tuple[ScratchBuffer, ...]:
        """What the exchange takes beside the launches' scratch, in the arena after it."""
        if self.is_alone:
            return ()
        mapped = self.mapped_buffers
        found = [*self._sum_buffers(), *self._row_buffers()]
        return tuple(buffer for buffer in found if buffer.nbytes and buffer not in mapped)

    @property
    def summed_ranks(self) -> int:
        """Ranks whose partial sums are added: all, or the tensor ranks where rows were added over the others."""
        return self.grid.tensor_size if self.splits_rows else self.grid.world_size

    @property
    def sums_in_order(self) -> bool:
        """Whether partial sums are added one rank after the other by this package, not by the process group."""
        least = 2 if self.reduce.transport == "copies" else 3  # two numbers have one sum
        return not self.is_alone and self.reduce.order == "ranks" and self.summed_ranks >= least

    @property
    def mapped_buffers(self) -> tuple[ScratchBuffer, ...]:
        """Those of the sum's buffers that peers write, in memory that the ranks map; shared by the layers of a grid."""
        if self.reduce.transport != "copies":
            return ()
        return tuple(buffer for buffer in self._sum_buffers() if buffer.name in _MAPPED)

    def _sum_buffers(self) -> list[ScratchBuffer]:
        tokens, partial, output = self.execution.capacity.max_tokens, self.partial_dtype, self.output_dtype
        hidden = self.execution.weights.source.geometry.hidden_size
        scatters = self.reduce.collective == "reduce_scatter"
        if self.is_alone:
            return []
        if self.sums_in_order:
            own = -(-tokens // self.summed_ranks)
            padded = own * self.summed_ranks
            found = [
                ScratchBuffer("partial", partial, (padded, hidden)),
                ScratchBuffer("parts", partial, (padded, hidden)),
                ScratchBuffer("own_sums32", "float32", (own, hidden)),
            ]
            if not scatters or self.splits_rows:
                found.append(ScratchBuffer("own_results", output, (own, hidden)))
                found.append(ScratchBuffer("results", output, (padded, hidden)))
            return found
        found = []
        if scatters or partial != output:
            found.append(ScratchBuffer("partial", partial, (tokens, hidden)))
        if scatters and partial != output and not self.splits_rows:
            own = -(-tokens // self.grid.world_size)
            found.append(ScratchBuffer("own_partial", partial, (own, hidden)))
        return found

    def _row_buffers(self) -> list[ScratchBuffer]:
        if not self.sums_rows:
            return []
        variants, size = self.execution.variants, self.grid.expert_size
        hidden = self.execution.weights.source.geometry.hidden_size
        nbytes = max(row_bytes(self.execution, variant) * (row_tokens(variant) // size) for variant in variants)
        own = max(row_tokens(variant) for variant in variants) // size
        return [
            ScratchBuffer("own_rows", "uint8", (nbytes,)),
            ScratchBuffer("own_sums", self.partial_dtype, (own, hidden)),
        ]

    @property
    def one_shot_nbytes(self) -> int:
        """Bytes of memory that peers read directly; shared by the layers of a grid."""
        most = self.execution.capacity.max_tokens * self.execution.weights.source.geometry.hidden_size
        bound = min(self.reduce.one_shot_bytes, most * IO_DTYPES[self.partial_dtype].itemsize)
        return 0 if self.is_alone or self.reduce.collective != "all_reduce" or self.splits_rows else bound

    @property
    def most_few_tokens(self) -> int:
        """Most tokens whose rows carry their router weights already, so that they are added with weights of one."""
        return max((v.tokens for v in self.execution.variants if v.path == FEW), default=0) if self.sums_rows else 0

    @property
    def own_nbytes(self) -> int:
        """Bytes that a binding allocates for itself: the map of experts, and weights of one."""
        capacity = self.execution.capacity
        return 4 * (capacity.route_experts or 0) + 4 * self.most_few_tokens * capacity.top_k

    def required_nbytes(self) -> int:
        """Bytes of the arena that a caller owns: the launches' scratch, then the exchange's buffers."""
        return _aligned(self.execution.required_nbytes()) + total_bytes(self.buffers)

    def compile_keys(self) -> tuple[KernelKey, ...]:
        """Every kernel that a run may launch, each once."""
        keys = self.execution.compile_keys()
        limits = self.execution.limits
        few = any(variant.path == FEW for variant in self.execution.variants)
        if not (self.sums_rows and few and limits is not None):
            return keys
        hidden = self.execution.weights.source.geometry.hidden_size
        ordered = ReduceKey(limits.arch, "ordered", "float32", self.partial_dtype, hidden % _CHUNK == 0)
        return tuple(dict.fromkeys((*keys, ordered)))

    def explain(self) -> str:
        """What will run, what will cross and why, in words."""
        grid, reduce = self.grid, self.reduce
        if self.is_alone:
            return self.execution.explain()
        share = grid.share(self.rank)
        held = (
            f"rank {self.rank} of {grid.expert_size} expert ranks x {grid.tensor_size} tensor ranks: experts "
            f"{share.experts.start}..{share.experts.stop}, channels {share.extent.first_channel}.."
            f"{share.extent.end_channel} of {share.extent.global_intermediate_size}"
        )
        lines = [held, self._explain_exchange()]
        if reduce.overlap_tokens is not None and not self.splits_rows:
            lines.append(f"pieces of at most {reduce.overlap_tokens} tokens; sums of one cross while the next one runs")
        if self.mapped_buffers:
            named = ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in self.mapped_buffers)
            lines.append(f"mapped by all ranks {total_bytes(self.mapped_buffers)} bytes: {named}")
        if self.buffers:
            named = ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in self.buffers)
            lines.append(f"buffers of the exchange {total_bytes(self.buffers)} bytes: {named}")
        return "\n".join([*lines, self.execution.explain()])

    def _explain_exchange(self) -> str:
        if self.is_alone:
            return f"nothing is exchanged; results in {self.output_dtype}"
        order = "one rank after the other" if self.sums_in_order else "by the process group"
        result = f"results in {self.output_dtype}, by {self.reduce.collective}"
        sums = f"partial sums cross in {self.partial_dtype}, are added {order}, {result}"
        if self.grid.expert_size == 1:
            return sums
        if not self.splits_rows:
            return f"{sums}; experts: each rank adds its own routes, so bits depend on who holds what"
        rows = (
            f"experts: rows of single routes cross and are added in slot order, the bits of one rank; up to "
            f"{SMALL_ROWS_BYTES} bytes of them by every rank, more by tokens"
        )
        return rows if self.grid.tensor_size == 1 else f"{rows}; then {sums}"


def plan_parallel(
    share: LayerShare,
    grid: RankGrid,
    rank: int,
    *,
    activation: ActivationSpec,
    capacity: ExecutionCapacity,
    reduce: ReduceSpec | None = None,
    routing: RoutingSpec | None = None,
    device: torch.device | str = "cpu",
    limits: DeviceLimits | None = None,
) -> ParallelPlan:
    """Plan the runs of a layer on one of many ranks.

    Args:
        share: what the rank holds, from `layer_share`.
        grid: who holds what.
        rank: of this plan in the grid.
        activation: dtypes and law; its output dtype is that of the result.
        capacity: the largest run.
        reduce: how the ranks' outputs become one (default: all-reduce in float32, experts in slot order).
        routing: see `plan_execution`.
        device: see `plan_execution`.
        limits: see `plan_execution`.

    Raises:
        MoeValueError: if partial sums are to cross in a dtype that is neither float32 nor the result's, or by copies
            between devices that are not CUDA's, the routing
            lets single launches add in any order where the ranks' rows are to be added in slot order, or as
            `plan_execution`.
        MoeUnsupportedError: if rows of experts under an intermediate Hadamard are to be added over ranks, or as
            `plan_execution`.
    """
    reduce = ReduceSpec() if reduce is None else reduce
    routing = RoutingSpec() if routing is None else routing
    ordered = grid.expert_size > 1 and reduce.experts == "ordered" and reduce.collective != "none"
    _check_reduce(reduce, activation.output_dtype, torch.device(device))
    if ordered:
        _check_rows(share, routing)
    alone = grid.world_size == 1 or reduce.collective == "none"
    partial = activation.output_dtype if alone or (ordered and grid.tensor_size == 1) else reduce.dtype
    if share.expert_map is not None:
        capacity = replace(capacity, route_experts=share.expert_map.numel())
    execution = plan_execution(
        plan_weights(share.source, share.extent),
        activation=replace(activation, output_dtype=partial),
        capacity=capacity,
        routing=routing,
        device=device,
        limits=limits,
    )
    return ParallelPlan(grid=grid, rank=rank, reduce=reduce, output_dtype=activation.output_dtype, execution=execution)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _check_reduce(reduce: ReduceSpec, output_dtype: str, device: torch.device) -> None:
    if reduce.transport == "copies" and device.type != "cuda":
        raise MoeValueError(f"transport 'copies' needs a CUDA device, got {device}; legal there is 'group'")
    if reduce.dtype not in ("float32", output_dtype):
        raise MoeValueError(
            f"partial sums cannot cross in {reduce.dtype}: legal are float32 and the result's {output_dtype}"
        )


def _check_rows(share: LayerShare, routing: RoutingSpec) -> None:
    """Accept a layer whose routes' rows can be added over ranks in slot order."""
    if share.source.expert_transform is not None:
        raise MoeUnsupportedError(
            "experts='ordered' does not take experts under an intermediate Hadamard, whose sums are rotated "
            "afterwards; experts='partial' does"
        )
    if not routing.deterministic_output:
        raise MoeValueError("experts='ordered' needs deterministic_output=True; experts='partial' takes either")
