"""Owns the last step of loading: each placeholder becomes its module, whose weight streams to the device.

It must not know names or architectures.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from trellis_format.decoded import StoredLinear
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.source import TrellisSource
from trellis_kernels.linear import precompile_linears
from trellis_moe.errors import MoeValueError
from trellis_moe.integrations.transformers.experts import TrellisExperts
from trellis_moe.integrations.transformers.options import TrellisOptions
from trellis_moe.integrations.transformers.skeleton import PlacedExperts, PlacedLinear, Skeleton
from trellis_moe.linear import TrellisLinear
from trellis_moe.module import TrellisMoE
from trellis_moe.parallel import GridGroups, open_groups, tensor_grid
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec, io_dtype_name
from trellis_prep import RankGrid, StagingBuffer, prepare_linear

__all__ = ["ModelFiller", "fill_modules"]


def fill_modules(model: PreTrainedModel, skeleton: Skeleton, options: TrellisOptions) -> None:
    """Put every quantised module into the model, on the device of its other weights.

    Args:
        model: its weights that are not quantised are on their device.
        skeleton: what is quantised.
        options: how.

    Raises:
        FormatError, PrepError, MoeError: if a file, a plan or the device does not hold up; the model is then unusable.
    """
    _unify_dtypes(model)
    steps: list[PlacedLinear | PlacedExperts] = [*skeleton.linears, *skeleton.experts]
    done, total = 0, sum(placed.nbytes for placed in steps)
    with StagingBuffer(model.device) as buffer:
        filler = ModelFiller(buffer, io_dtype_name(model.dtype), options)
        for placed in steps:
            model.set_submodule(placed.path, filler.module(placed))
            done += placed.nbytes
            if options.progress is not None:
                options.progress(placed.path, done, total)
    linears = [module.prepared for module in model.modules() if isinstance(module, TrellisLinear)]
    precompile_linears(linears, model.dtype, jobs=options.compile_jobs)


def _unify_dtypes(model: PreTrainedModel) -> None:
    """Cast tensors that transformers loaded in the checkpoint's half precision instead of the model's.

    Some releases leave those alone whose name in the checkpoint is not the model's.  float32 is the model's choice for
    a tensor and stays.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype not in (model.dtype, torch.float32):
            parameter.data = parameter.data.to(model.dtype)


class ModelFiller:
    """Makes the modules of one model, whose expert layers share scratch and groups of ranks.

    Args:
        buffer: host memory that all weights pass through on their way to its device.
        dtype: of activations, a key of `IO_DTYPES`.
        options: how.
    """

    def __init__(self, buffer: StagingBuffer, dtype: str, options: TrellisOptions) -> None:
        self._buffer = buffer
        self._device = buffer.device
        self._dtype = dtype
        self._options = options
        self._scratch: torch.Tensor | None = None
        self._groups: dict[RankGrid, GridGroups] = {}

    def module(self, placed: PlacedLinear | PlacedExperts) -> nn.Module:
        """The module of a placed linear or layer, its weight on the device.

        Raises:
            FormatError, PrepError, MoeError: see `fill_modules`.
        """
        return self._linear(placed) if isinstance(placed, PlacedLinear) else self._experts(placed)

    def _linear(self, placed: PlacedLinear) -> TrellisLinear:
        placed.linear.check_marker()
        stored = StoredLinear.of_exl3(placed.linear)
        prepared = prepare_linear(stored, device=self._device, staging=self._options.staging, buffer=self._buffer)
        return TrellisLinear(prepared, placed.in_features, placed.out_features)

    def _experts(self, placed: PlacedExperts) -> TrellisExperts:
        source, weights = trellis_from_exl3(placed.layer)
        if source.activation is None:
            raise MoeValueError(f"{placed.path}: the checkpoint's configuration states no activation")
        options = self._options
        activation = ActivationSpec(nonlinearity=source.activation, io_dtype=self._dtype, output_dtype=self._dtype)
        capacity = ExecutionCapacity(
            max_tokens=options.max_tokens, top_k=placed.top_k, scratch_bound=options.scratch_bytes
        )
        routing = RoutingSpec(id_dtype="int64", weight_dtype="float32")
        layer = TrellisMoE(
            source,
            weights,
            capacity=capacity,
            activation=activation,
            routing=routing,
            device=self._device,
            group=None if options.group is None else self._opened(source, options.group),
            staging=options.staging,
            scratch=self._arena,
            buffer=self._buffer,
        )
        return TrellisExperts(layer, options.max_tokens)

    def _opened(self, source: TrellisSource, group: dist.ProcessGroup) -> GridGroups:
        """The groups of ranks that share a layer; layers of one geometry have the same."""
        grid = tensor_grid(source, dist.get_world_size(group))
        if grid not in self._groups:
            self._groups[grid] = open_groups(grid, group)
        return self._groups[grid]

    def _arena(self, nbytes: int) -> torch.Tensor:
        """Scratch for a layer: that of the one before where it suffices, since layers run one after the other."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch
