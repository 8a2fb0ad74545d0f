"""Owns the door to vLLM: the quantisation method `exl3`, for linears and routed experts of EXL3 checkpoints.

It must not know kernels or the layout of files, and nothing of trellis imports it: vLLM does, through the entry point
`trellis` of the group `vllm.general_plugins`.  The hooks are those of vLLM 0.33.

vLLM builds the model and streams the checkpoint's tensors to it.  Tensors of quantised linears are dropped from that
stream by their names, before they are read; after loading, each quantised module reads this rank's share of its own
linears, in source coordinates, through bounded staging.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.model_executor.models.utils import WeightsMapper

from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.decoded import StoredLinear
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import LayerKey, find_layer, find_layers, group_modules
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.extent import BLOCK
from trellis_format.files.boxes import take_box
from trellis_format.rates import TILE
from trellis_kernels.linear import precompile_linears
from trellis_moe.errors import MoeUnsupportedError, MoeValueError
from trellis_moe.linear import TrellisLinear
from trellis_moe.module import TrellisMoE
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec, io_dtype_name
from trellis_prep import prepare_linear, rank_extent

__all__ = ["METHOD", "Exl3Config", "Exl3LinearMethod", "Exl3MoEMethod", "LinearCut", "StoredModel", "register"]

METHOD = "exl3"
"""Name of the method, as `quantization_config.quant_method` of a checkpoint states it."""
SCRATCH_BOUND = 512 << 20
"""Most bytes of scratch, which all layers of a device share; launches are cut to stay within."""
_STREAMED_SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")  # biases stay vLLM's own parameters
_MIN_CAPABILITY = 80
_MOST_COUNT = 512  # tokens of the largest launch that is planned for its own count


def register() -> None:
    """Make the method known to vLLM; its entry point, called in every process, any number of times."""
    register_quantization_config(METHOD)(Exl3Config)


class StoredModel:
    """The quantised linears and layers of one checkpoint, opened from its headers.

    Attributes:
        layers: the layers of routed experts by the path of their experts.
        plain: names of the modules whose tensors are not quantised.

    Args:
        folder: its directory.

    Raises:
        FormatError: if the checkpoint breaks a rule.
    """

    def __init__(self, folder: str) -> None:
        self._checkpoint: Checkpoint = open_checkpoint(folder)
        found = group_modules(self._checkpoint.tensors)
        self._modules = found.linears
        self.plain = frozenset(name.rpartition(".")[0] for name in found.others)
        self.layers: dict[str, LayerKey] = {key.prefix: key for key in find_layers(self._checkpoint)}

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that were read so far."""
        return self._checkpoint.bytes_read

    @property
    def names(self) -> frozenset[str]:
        """Module names of all quantised linears."""
        return frozenset(self._modules)

    def linear(self, name: str) -> Exl3Linear:
        """A linear by its module name."""
        return describe_linear(name, self._modules[name])

    def experts(self, prefix: str) -> Any:
        """Source and weights of the routed experts under a path."""
        return trellis_from_exl3(find_layer(self._checkpoint, self.layers[prefix]))


@lru_cache(maxsize=2)  # a model and its draft model
def _opened(folder: str) -> StoredModel:
    return StoredModel(folder)


class Exl3Config(QuantizationConfig):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What vLLM keeps of the method for one model: where the checkpoint is, and how its names differ from vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self._model = ""
        self._revision: str | None = None
        self._mapper = WeightsMapper()
        self._arenas: dict[torch.device, torch.Tensor] = {}

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return _MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        """Everything is read from the tensors' headers; the configuration only names the method."""
        del config
        return cls()

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Drop the tensors of quantised linears from vLLM's stream; they are views of the file, and never read."""
        return WeightsMapper(orig_to_new_suffix={f".{suffix}": None for suffix in _STREAMED_SUFFIXES})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._mapper = replace(hf_to_vllm_mapper, orig_to_new_stacked={})  # joined linears are told apart here

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        del hf_config
        self._model, self._revision = model_name, revision

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """The method of a module: ours where the checkpoint has its linears quantised, else vLLM's own.

        Raises:
            MoeUnsupportedError: if some of the linears that the module joins are quantised and others are not, or the
                checkpoint has nothing of the module's name: vLLM would run it on memory that was never written.
        """
        if isinstance(layer, RoutedExperts):
            experts = self._find_experts(prefix)
            if experts is not None:
                return Exl3MoEMethod(layer.moe_config, self, experts)
        elif isinstance(layer, LinearBase | ParallelLMHead):
            linears = self._find_linears(prefix)
            if linears is not None:
                return Exl3LinearMethod(self, linears)
        if isinstance(layer, RoutedExperts | LinearBase):
            self._check_plain(prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, or another process, gets: names alone, no open files and no memory."""
        return {name: value for name, value in vars(self).items() if name != "stored"} | {"_arenas": {}}

    @cached_property
    def stored(self) -> StoredModel:
        """The opened checkpoint; one for all configurations of a process."""
        folder = self._model
        if not os.path.isdir(folder):
            patterns = ["*.safetensors", "*.json"]
            folder = download_weights_from_hf(folder, None, patterns, revision=self._revision)
        return _opened(str(Path(folder)))

    @cached_property
    def _names(self) -> dict[str, str]:
        """Module names of the checkpoint, by vLLM's."""
        return self._renamed(self.stored.names)

    def _renamed(self, names: frozenset[str] | Mapping[str, Any]) -> dict[str, str]:
        mapped = {name: self._mapper.map_name(f"{name}.weight") for name in names}
        return {new.removesuffix(".weight"): name for name, new in mapped.items() if new is not None}

    def _check_plain(self, prefix: str) -> None:
        parent = prefix.rpartition(".")[0]
        names = {prefix, *(f"{parent}.{member}".removeprefix(".") for member in self._members(prefix))}
        plain = self._renamed(self.stored.plain)
        if not any(name in names or name.startswith(f"{prefix.removesuffix('.routed_experts')}.") for name in plain):
            raise MoeUnsupportedError(
                f"{prefix}: the checkpoint has neither codes nor weights of that name; renamed as vLLM does for this "
                f"model, its first module is {min(self._names, default='none')}"
            )

    def _members(self, prefix: str) -> list[str]:
        """Last names of the linears that a module joins."""
        return list(self.packed_modules_mapping.get(prefix.rpartition(".")[2], []))

    def _find_experts(self, prefix: str) -> str | None:
        renamed = self._renamed(self.stored.layers)
        candidates = (prefix, prefix.removesuffix(".routed_experts"))
        return next((renamed[name] for name in candidates if name in renamed), None)

    def _find_linears(self, prefix: str) -> tuple[str, ...] | None:
        if prefix in self._names:
            return (self._names[prefix],)
        parent = prefix.rpartition(".")[0]
        names = [f"{parent}.{member}".removeprefix(".") for member in self._members(prefix)]
        present = [name for name in names if name in self._names]
        if not present:
            return None
        if len(present) < len(names):
            missing = next(name for name in names if name not in self._names)
            raise MoeUnsupportedError(
                f"{prefix} joins {len(names)} linears of which {len(present)} are quantised; {missing} is not: all or "
                "none must be, since vLLM runs them as one"
            )
        return tuple(self._names[name] for name in names)

    def arena(self, device: torch.device) -> Callable[[int], torch.Tensor]:
        """What gives layers of a device their scratch: the one before, where it suffices, since they run in turn."""

        def give(nbytes: int) -> torch.Tensor:
            if device not in self._arenas or self._arenas[device].numel() < nbytes:
                self._arenas[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return self._arenas[device]

        return give


@dataclass(frozen=True)
class LinearCut:
    """A rank's part of one stored linear.

    Attributes:
        linear: its headers.
        inputs: channels of the whole linear that this rank's x has.
        outputs: channels that this rank computes; what lies beyond the stored ones is zero.

    A part need not end on blocks of 128 channels: the blocks that cover it are prepared, x is padded with zeros to
    them, which changes no sum, and outputs are cut.
    """

    linear: Exl3Linear
    inputs: range
    outputs: range

    @property
    def covered_inputs(self) -> range:
        """Whole blocks of input channels, in the linear's coordinates."""
        return _cover(self.inputs, self.linear.k)

    @property
    def covered_outputs(self) -> range:
        """Whole blocks of output channels, in the linear's coordinates; empty where the part is beyond them."""
        return _cover(self.outputs, self.linear.n)

    def stored(self) -> StoredLinear:
        """The covering blocks as a linear of their own; codes stay in the file."""
        whole, rows, columns = StoredLinear.of_exl3(self.linear), self.covered_inputs, self.covered_outputs
        box = (
            slice(rows.start // TILE, rows.stop // TILE),
            slice(columns.start // TILE, columns.stop // TILE),
            slice(0, whole.codes.shape[2]),
        )
        return replace(
            whole,
            codes=take_box(whole.codes, box),
            suh=lambda: whole.suh()[rows.start : rows.stop],
            svh=lambda: whole.svh()[columns.start : columns.stop],
            bias=None,  # vLLM's own parameter, which it adds on one rank
        )


class Exl3LinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Linears of a module, as many as it joins, each on this rank's part.

    Args:
        config: of the model.
        names: of the stored linears, in the order of the module's outputs; one may hold all of them.
    """

    def __init__(self, config: Exl3Config, names: tuple[str, ...]) -> None:
        super().__init__()
        self._config = config
        self._names = names

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Cut this rank's parts; nothing is allocated, since the weights come after loading.

        Raises:
            MoeValueError: if a stored linear is narrower than vLLM's; names both.
        """
        del extra_weight_attrs
        linears = [self._config.stored.linear(name) for name in self._names]
        first = 0 if input_size_per_partition == input_size else input_size_per_partition * _rank(layer)
        inputs = range(first, first + input_size_per_partition)
        is_shared = sum(output_partition_sizes) != output_size
        outputs = _output_parts(layer, output_partition_sizes, joins=len(linears) > 1, is_shared=is_shared)
        if len(linears) == 1:
            linears *= len(outputs)
        if len(linears) != len(outputs):
            raise MoeValueError(
                f"{self._names[0]}: {len(linears)} linears are stored for the {len(outputs)} outputs of vLLM's module"
            )
        cuts = [LinearCut(linear, inputs, part) for linear, part in zip(linears, outputs, strict=True)]
        for cut in cuts:
            _check_inside(cut, isinstance(layer, ParallelLMHead))
        layer.trellis_cuts = cuts
        layer.trellis_device = torch.empty(0).device  # vLLM builds a model under its device
        layer.trellis_dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read and prepare this rank's parts; every kernel of theirs is compiled here.

        Raises:
            FormatError, PrepError: if a file or the device does not hold up.
        """
        if hasattr(layer, "trellis"):
            return
        layer.trellis = torch.nn.ModuleList()
        for cut in layer.trellis_cuts:
            cut.linear.check_marker()
            part = (
                TrellisLinear(prepare_linear(cut.stored(), device=layer.trellis_device))
                if cut.covered_outputs
                else None
            )
            layer.trellis.append(part or torch.nn.Identity())  # a head's part may be padding alone
        held = [part.prepared for part in layer.trellis if isinstance(part, TrellisLinear)]
        precompile_linears(held, layer.trellis_dtype)  # now, since a captured launch must find its kernels

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by this rank's parts, side by side: y = x @ W + bias.

        Args:
            layer: whose weights.
            x: `[..., in]`, this rank's channels.
            bias: `[out]`, or None.

        Returns:
            `[..., out]` in x's dtype.
        """
        parts = [_apply_cut(cut, part, x) for cut, part in zip(layer.trellis_cuts, layer.trellis, strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if bias is None else y + bias

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """A quantised head has codes of its own, and is tied to nothing."""
        del embed_tokens
        return layer


class Exl3MoEMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The routed experts of a layer on this rank: a part of the intermediate axis, or whole experts.

    Args:
        moe: vLLM's description of the layer.
        config: of the model.
        prefix: path of the experts in the checkpoint.
    """

    def __init__(self, moe: Any, config: Exl3Config, prefix: str) -> None:
        super().__init__(moe)
        self._config = config
        self._prefix = prefix

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Refuse what the layer cannot be asked for; nothing is allocated, since the weights come after loading.

        Raises:
            MoeUnsupportedError: if vLLM would run two batches at once over the shared scratch.
        """
        del num_experts, hidden_size, intermediate_size_per_partition, extra_weight_attrs
        if get_current_vllm_config().parallel_config.enable_dbo:
            raise MoeUnsupportedError("dual batch overlap runs two batches over one scratch; turn --enable-dbo off")
        layer.trellis_device = torch.empty(0).device  # vLLM builds a model under its device
        layer.trellis_dtype = params_dtype

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Nothing: kernels of vLLM do not run here."""
        del layer

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes as they are; padding is the checkpoint's business."""
        del act_dtype, moe_parallel_config
        return hidden_size, intermediate_size_per_partition

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """What route ids are planned as."""
        return torch.int32

    def process_weights_after_loading(self, layer: Any) -> None:
        """Plan, prepare and bind this rank's share; every kernel of the layer is compiled here.

        Raises:
            FormatError, PrepError, MoeError: if a file, a plan or the device does not hold up.
        """
        if hasattr(layer, "trellis"):
            return
        source, weights = self._config.stored.experts(self._prefix)
        moe, geometry = self.moe, source.geometry
        checked = {"experts": (geometry.num_experts, moe.num_experts), "hidden": (geometry.hidden_size, moe.hidden_dim)}
        for what, (stored, wanted) in checked.items():
            if stored != wanted:
                raise MoeValueError(f"{self._prefix}: {what} {stored} in the checkpoint, {wanted} in vLLM's layer")
        if source.activation is None:
            raise MoeUnsupportedError(f"{self._prefix}: config.json states no activation that is known")
        name = io_dtype_name(layer.trellis_dtype)
        shares = moe.moe_parallel_config
        experts = _own_experts(layer) if shares.use_ep else None
        tokens = moe.max_num_tokens * max(shares.dp_size, 1)
        layer.trellis = TrellisMoE(
            source,
            weights,
            capacity=ExecutionCapacity(
                max_tokens=tokens,
                top_k=moe.experts_per_token,
                token_counts=_token_counts(tokens),
                scratch_bound=SCRATCH_BOUND,
            ),
            activation=ActivationSpec(nonlinearity=source.activation, io_dtype=name, output_dtype=name),
            routing=RoutingSpec(
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                id_dtype="int32",
                weight_dtype="float32",
            ),
            device=layer.trellis_device,
            extent=rank_extent(geometry.padded_intermediate_size, shares.tp_rank, shares.tp_size, allow_empty=True),
            experts=experts,
            reduce="none",  # vLLM adds the ranks up
            scratch=self._config.arena(layer.trellis_device),
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's partial sum over its experts and channels; vLLM adds the ranks up and runs shared experts.

        Args:
            layer: whose weights.
            x: `[tokens, hidden]`.
            topk_weights: `[tokens, top_k] float32`.
            topk_ids: `[tokens, top_k] int32`, ids of the whole layer; -1 is none.
            shared_experts: vLLM's own, which it runs around this.
            shared_experts_input: likewise.

        Returns:
            `[tokens, hidden]` in x's dtype.
        """
        del shared_experts, shared_experts_input
        y: torch.Tensor = layer.trellis(x, topk_ids, topk_weights)
        return y


def _cover(part: range, stored: int) -> range:
    """The blocks of 128 channels that cover a part, as far as they are stored."""
    first = min(part.start // BLOCK * BLOCK, stored)
    return range(first, max(min(-(-part.stop // BLOCK) * BLOCK, stored), first))


def _rank(layer: Any) -> int:
    return int(getattr(layer, "tp_rank", 0))


def _output_parts(layer: Any, sizes: list[int], *, joins: bool, is_shared: bool) -> list[range]:
    """This rank's channels of each output, in the coordinates of its linear, or of the one linear that holds all."""
    if isinstance(layer, ParallelLMHead):
        start = int(layer.shard_indices.org_vocab_start_index)
        return [range(start, start + sizes[0])]
    rank, world = (_rank(layer), int(layer.tp_size)) if is_shared else (0, 1)
    parts, base = [], 0
    for place, size in enumerate(sizes):
        replicas = int(getattr(layer, "num_kv_head_replicas", 1)) if is_shared and place else 1  # ranks that share k, v
        first = base + rank // replicas * size
        parts.append(range(first, first + size))
        base += 0 if joins else size * world // replicas
    return parts


def _check_inside(cut: LinearCut, is_padded: bool) -> None:
    for side, part, stored in (("input", cut.inputs, cut.linear.k), ("output", cut.outputs, cut.linear.n)):
        if part.stop > stored and not (is_padded and side == "output"):
            raise MoeValueError(f"{cut.linear.name} has {stored} {side} channels, vLLM's module {part.stop} or more")


def _apply_cut(cut: LinearCut, part: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows, columns = cut.covered_inputs, cut.covered_outputs
    if not columns:
        return x.new_zeros(*x.shape[:-1], len(cut.outputs))
    before, after = cut.inputs.start - rows.start, rows.stop - cut.inputs.stop
    y: torch.Tensor = part(torch_functional.pad(x, (before, after)) if before or after else x)
    low, high = cut.outputs.start - columns.start, columns.stop - cut.outputs.stop
    return torch_functional.pad(y, (-low, -high)) if low or high else y  # a negative pad cuts


def _own_experts(layer: Any) -> range:
    """Ids of this rank's experts, in local order.

    Raises:
        MoeUnsupportedError: if they are no arithmetic progression.
    """
    table = layer.expert_map_manager.expert_map.tolist()
    local = sorted((place, expert) for expert, place in enumerate(table) if place >= 0)
    ids = [expert for _, expert in local]
    step = ids[1] - ids[0] if len(ids) > 1 else 1
    own = range(ids[0], ids[0] + step * len(ids), step)
    if list(own) != ids:
        raise MoeUnsupportedError(f"experts {ids} of a rank; vLLM's placements linear and round_robin are supported")
    return own


def _token_counts(most: int) -> tuple[int, ...]:
    """Token counts that get launches of their own: powers of two, so that steps of few sequences are not padded far."""
    return tuple(1 << power for power in range(_MOST_COUNT.bit_length()) if 1 << power <= most)
