"""Owns `TrellisMoE`, the routed experts of one layer as a torch module, alone or on many ranks.

It must not know containers.  A forward is one custom op, so that `torch.compile(fullgraph=True)` takes it as it is, and
a CUDA graph holds all that it launches, collectives included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_moe.binding import Binding, bind
from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.parallel.groups import GridGroups, open_groups
from trellis_moe.parallel.layer import ParallelLayer, bind_parallel
from trellis_moe.parallel.plan import ParallelPlan, plan_parallel
from trellis_moe.parallel.reduction import ReduceSpec
from trellis_moe.parallel.share import LayerShare, layer_share, tensor_grid
from trellis_moe.plan import ExecutionPlan, plan_weights
from trellis_moe.specs import ID_DTYPES, IO_DTYPES, ActivationSpec, ExecutionCapacity, RoutingSpec, io_dtype_name
from trellis_prep import PreparedExperts, RankGrid, StagingBuffer, TrellisStaging, select_experts
from trellis_prep.expert_shares import expert_map

__all__ = ["TrellisMoE"]

_BOUNDARY = 16  # bytes; where kernels read rows from


class TrellisMoE(torch.nn.Module):
    """The routed experts of one layer, planned, prepared and bound; for inference.

    Weights live in `prepared`, at fixed addresses: the module has no parameters, `to` does not move it, and its state
    is empty.  Runs of one instance, and of all that share a scratch, follow each other whatever their streams; two
    threads at once are refused, and replays of CUDA graphs are the caller's to order.

    Attributes:
        plan: of this rank.
        prepared: this rank's weights.

    Args:
        source: the whole layer.
        weights: its arrays; a rank reads its share alone.
        capacity: the largest run.
        activation: dtypes and law (default: the source's law, `dtype` in and out).
        dtype: of x and of the result, where no activation is given.
        routing: dtypes of routes; others are converted at each forward.
        device: `cpu` or a CUDA device.
        group: the ranks that share the layer: groups that were opened for a grid, or a process group, whose ranks
            share the intermediate axis evenly unless `extent` or `experts` say otherwise.  None exchanges nothing: the
            result is the sum over what this rank holds.
        extent: this rank's part of the intermediate axis.
        experts: ids of this rank's experts, in the order of its storage; in a group, a range.
        reduce: `all_reduce`, `reduce_scatter` or `none`, or all of it as a `ReduceSpec`.
        staging: bounds of preparation.
        scratch: `[bytes] uint8` on the device, at least `plan.required_nbytes()`, which layers that run one after the
            other may share, or a function that gives one of at least so many bytes; None allocates it.
        progress: called with (bytes prepared, bytes in all).
        buffer: host memory of preparation that is kept from layer to layer; None takes its own for this one.

    Raises:
        MoeTypeError, MoeValueError, MoeUnsupportedError, PrepError: if a declaration does not hold up.
        MoeDistributedError: if a rank is gone.
    """

    def __init__(
        self,
        source: TrellisSource,
        weights: TrellisWeights,
        *,
        capacity: ExecutionCapacity,
        activation: ActivationSpec | None = None,
        dtype: torch.dtype = torch.bfloat16,
        routing: RoutingSpec | None = None,
        device: torch.device | str,
        group: GridGroups | dist.ProcessGroup | None = None,
        extent: TrellisExtent | None = None,
        experts: Sequence[int] | None = None,
        reduce: ReduceSpec | str = "all_reduce",
        staging: TrellisStaging | None = None,
        scratch: torch.Tensor | Callable[[int], torch.Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
        buffer: StagingBuffer | None = None,
    ) -> None:
        super().__init__()
        spec = activation if activation is not None else _own_law(source, dtype)
        groups = _groups(source, group, extent, experts)
        if groups is None:
            grid, rank = tensor_grid(source, 1), 0
            share = _own_share(source, weights, extent, experts)
        else:
            grid, rank = groups.grid, groups.rank
            share = layer_share(source, weights, grid, rank)
        plan = plan_parallel(
            share,
            grid,
            rank,
            activation=spec,
            capacity=capacity,
            reduce=ReduceSpec(collective=reduce) if isinstance(reduce, str) else reduce,
            routing=routing,
            device=device,
        )
        prepared = prepare_weights(
            plan.execution.weights, share.weights, device=device, staging=staging, progress=progress, buffer=buffer
        )
        arena = scratch(plan.required_nbytes()) if callable(scratch) else scratch
        self._attach(bind_parallel(plan, prepared, groups, arena, expert_map=share.expert_map))

    @classmethod
    def from_prepared(
        cls, plan: ExecutionPlan, experts: PreparedExperts, *, scratch: torch.Tensor | None = None
    ) -> TrellisMoE:
        """A module over weights that are prepared already; nothing is exchanged.

        Args:
            plan: its runs; the result has the plan's output dtype.
            experts: of the plan's share.
            scratch: see `bind`.

        Raises:
            MoeTypeError, MoeValueError: as `bind`.
        """
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        module._attach(bind(plan, experts, scratch))
        return module

    def _attach(self, layer: ParallelLayer | Binding) -> None:
        self.plan: ParallelPlan | ExecutionPlan = layer.plan
        self.prepared = layer.experts
        execution = layer.plan.execution if isinstance(layer.plan, ParallelPlan) else layer.plan
        self._layer = layer
        self._handle = next(_HANDLES)
        self._io_dtype = IO_DTYPES[execution.activation.io_dtype]
        self._id_dtype = ID_DTYPES[execution.routing.id_dtype]
        self._weight_dtype = IO_DTYPES[execution.routing.weight_dtype]
        scatters = isinstance(layer, ParallelLayer) and layer.groups is not None
        scatters = scatters and layer.plan.reduce.collective == "reduce_scatter"  # type: ignore[union-attr]  # checked
        self._parts = layer.groups.world.size if scatters else 1  # type: ignore[union-attr]  # likewise
        output = layer.plan.output_dtype if isinstance(layer.plan, ParallelPlan) else execution.activation.output_dtype
        self._output_dtype = IO_DTYPES[output]
        _LAYERS[self._handle] = self

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Run the routed experts; on many ranks every rank has to call it, with the same tokens.

        Args:
            x: `[tokens, hidden]` in the io dtype.
            topk_ids: `[tokens, top_k] int32 or int64`, ids of the whole layer; one outside it adds nothing.
            topk_weights: `[tokens, top_k]`, of a floating dtype.

        Returns:
            `[tokens, hidden]`, for a reduce-scatter `[tokens / ranks, hidden]`, in the output dtype.

        Raises:
            MoeTypeError, MoeValueError, MoeDistributedError: as `ParallelLayer.run`.
        """
        ids = topk_ids.to(self._id_dtype).contiguous()
        weights = topk_weights.to(self._weight_dtype).contiguous()
        if torch.compiler.is_compiling():
            result: torch.Tensor = _run_layer(
                x.contiguous(), ids, weights, self._handle, self._parts, self._output_dtype
            )
            return result
        return self._run(x.contiguous(), ids, weights)

    def _run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._io_dtype:
            raise MoeTypeError(f"x must be {self._io_dtype}, got {x.dtype}")
        if x.data_ptr() % _BOUNDARY:  # a view of some rows may begin anywhere
            x = x.clone()
        shape = (x.shape[0] // self._parts, *x.shape[1:])
        out = torch.empty(shape, dtype=self._output_dtype, device=x.device)
        return self._layer.run(x, ids, weights, out=out)

    def extra_repr(self) -> str:
        """The plan in a line."""
        execution = self.plan.execution if isinstance(self.plan, ParallelPlan) else self.plan
        geometry, extent = execution.weights.source.geometry, execution.weights.extent
        return (
            f"{geometry.num_experts} experts, {geometry.hidden_size} x {extent.width} of "
            f"{extent.global_intermediate_size}, top {execution.capacity.top_k}, {execution.capacity.max_tokens} tokens"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise MoeTypeError(
            "a TrellisMoE holds addresses of a device and cannot be copied or pickled; build another one"
        )


_HANDLES = itertools.count()
_LAYERS: WeakValueDictionary[int, TrellisMoE] = (
    WeakValueDictionary()
)  # an op takes numbers, so a module is known by one


@torch.library.custom_op("trellis_moe::layer", mutates_args=())
def _run_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    handle: int,
    parts: int,  # noqa: ARG001  # the fake's: a trace sees no modules
    dtype: torch.dtype,  # noqa: ARG001  # likewise
) -> torch.Tensor:
    return _LAYERS[handle]._run(x, topk_ids, topk_weights)


@_run_layer.register_fake
def _run_layer_fake(
    x: torch.Tensor,
    topk_ids: torch.Tensor,  # noqa: ARG001  # the signature is the op's
    topk_weights: torch.Tensor,  # noqa: ARG001  # the signature is the op's
    handle: int,  # noqa: ARG001  # the signature is the op's
    parts: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((x.shape[0] // parts, x.shape[1]), dtype=dtype)


def _own_law(source: TrellisSource, dtype: torch.dtype) -> ActivationSpec:
    if source.activation is None:
        raise MoeValueError("the source states no activation; give one")
    name = io_dtype_name(dtype)
    return ActivationSpec(nonlinearity=source.activation, io_dtype=name, output_dtype=name)


def _own_share(
    source: TrellisSource, weights: TrellisWeights, extent: TrellisExtent | None, experts: Sequence[int] | None
) -> LayerShare:
    """The share of a rank whose peers, if any, are the caller's business."""
    place, count = plan_weights(source, extent).extent, source.geometry.num_experts
    if experts is None or list(experts) == list(range(count)):
        return LayerShare(source, weights, place, None)
    table = torch.from_numpy(expert_map(count, experts))
    chosen = experts if len(experts) else range(1)  # a stand-in, to which no route leads
    return LayerShare(*select_experts(source, weights, chosen), place, table)


def _groups(
    source: TrellisSource,
    group: GridGroups | dist.ProcessGroup | None,
    extent: TrellisExtent | None,
    experts: Sequence[int] | None,
) -> GridGroups | None:
    if group is None:
        return None
    if isinstance(group, GridGroups):
        if extent is not None or experts is not None:
            raise MoeValueError(
                "the grid of the groups says who holds what; extent and experts go with a process group"
            )
        return group
    if extent is None and experts is None:
        return open_groups(tensor_grid(source, dist.get_world_size(group)), group)
    ids = range(source.geometry.num_experts) if experts is None else experts
    if not isinstance(ids, range):
        raise MoeTypeError(f"experts of a group must be a range, got {type(ids).__name__}")
    place = TrellisExtent.whole(source.geometry.padded_intermediate_size) if extent is None else extent
    return open_groups(_joined_grid((place, ids), group), group)


def _joined_grid(mine: tuple[TrellisExtent, range], group: dist.ProcessGroup) -> RankGrid:
    """The grid that the ranks' own shares make.

    Raises:
        MoeValueError: if they make none.
        PrepValueError: if they overlap or leave a hole.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    size = next((rank for rank, (_, experts) in enumerate(found) if experts != found[0][1]), len(found))
    extents, ranges = tuple(extent for extent, _ in found[:size]), tuple(experts for _, experts in found[::size])
    if found != [(extent, experts) for experts in ranges for extent in extents]:
        raise MoeValueError(
            f"the ranks' shares make no grid of experts by extents: {', '.join(map(str, found))}; rank = expert rank * "
            "tensor size + tensor rank"
        )
    return RankGrid(extents, ranges)
