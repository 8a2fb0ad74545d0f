"""Owns the fused forward of an expert layer for few tokens: its three launches, and the checks before them.

It must not know checkpoints, plans or how a key is chosen.  The launches are `moe_route` (groups and rotated inputs),
`moe_up` (gate, up and all between the GEMMs) and `moe_down` (down, weights and the ordered sum).  Each begins while the
one before it drains, and waits for its memory.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_format.source import Projection
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.cute import compiler
from trellis_kernels.cute.argument_slots import ArgumentSlots
from trellis_kernels.cute.decode import table_address
from trellis_kernels.cute.moe_direct_down import direct_down_bytes, direct_down_kernel
from trellis_kernels.cute.moe_direct_up import direct_up_bytes, direct_up_kernel
from trellis_kernels.cute.moe_down import down_kernel, down_shared_bytes
from trellis_kernels.cute.moe_key import HEADER_BYTES, MoeSmallKey, Tiling, expert_class, scratch_nbytes
from trellis_kernels.cute.moe_route import ROUTE_THREADS, route_blocks, route_kernel
from trellis_kernels.cute.moe_up import up_kernel, up_shared_bytes
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS
from trellis_kernels.errors import KernelTypeError, KernelValueError
from trellis_prep import PreparedExperts

__all__ = ["MoeSmall", "build", "load", "moe_small"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SHARED_PER_SM_KIB = 228
_ALIGNMENT = 16  # bytes, of x and out
_MOST_GRID_Y = 65535
_FULL_THREADS = 768  # of an SM whose threads have 80 registers each
_ADDRESSES, _INTEGERS = 15, 7  # arguments of the compiled function


def _carveout(shared_bytes: int, resident: int) -> int:
    """Percent of an SM's shared memory that the resident blocks need, with the 1 KiB that each one reserves."""
    need = resident * (shared_bytes + 1024)
    return min(100, -(-need * 100 // (_SHARED_PER_SM_KIB * 1024)))


def _occupancy(tiling: Tiling, threads: int, shared_bytes: int) -> dict[str, int]:
    """Options of a launch: room for the resident blocks, or where there need be none for as many as fill an SM."""
    if tiling.resident == 1:
        return {"preferred_smem_carveout": _carveout(shared_bytes, max(_FULL_THREADS // threads, 1))}
    return {
        "min_blocks_per_mp": tiling.resident,
        "preferred_smem_carveout": _carveout(shared_bytes, tiling.resident),
    }


@cute.jit
def _host(
    x: Int64,
    ids: Int64,
    weights: Int64,
    g_map: Int64,
    words: Int64,
    g_table: Int64,
    descriptors: Int64,
    input_scales: Int64,
    middle_scales: Int64,
    output_scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    down_bias: Int64,
    out: Int64,
    scratch: Int64,
    tokens: Int32,
    max_tokens: Int32,
    groups: Int32,
    blocks: Int32,
    map_length: Int32,
    map_bytes: Int32,
    experts: Int32,
    factor: Float32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    if cutlass.const_expr(key.direct):
        _launch_direct(
            x, ids, weights, g_map, words, g_table, descriptors, input_scales, middle_scales, output_scales, gate_bias,
            up_bias, down_bias, out, scratch, tokens, max_tokens, map_length, map_bytes, experts, factor, key, stream,
        )  # fmt: skip
    else:
        _launch_grouped(
            x, ids, weights, g_map, words, g_table, descriptors, input_scales, middle_scales, output_scales, gate_bias,
            up_bias, down_bias, out, scratch, tokens, max_tokens, groups, blocks, map_length, map_bytes, experts,
            factor, key, stream,
        )  # fmt: skip


@cute.jit
def _launch_direct(
    x: Int64,
    ids: Int64,
    weights: Int64,
    g_map: Int64,
    words: Int64,
    g_table: Int64,
    descriptors: Int64,
    input_scales: Int64,
    middle_scales: Int64,
    output_scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    down_bias: Int64,
    out: Int64,
    scratch: Int64,
    tokens: Int32,
    max_tokens: Int32,
    map_length: Int32,
    map_bytes: Int32,
    experts: Int32,
    factor: Float32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    direct_up_kernel(
        x, ids, g_map, map_length, map_bytes, experts, descriptors, words, g_table, input_scales, scratch, tokens,
        max_tokens, key,
    ).launch(
        grid=[key.width // BLOCK // key.up.blocks * key.up.split, tokens * key.top_k, 1],
        block=[key.threads("up"), 1, 1],
        stream=stream,
        use_pdl=key.overlaps,
        **_occupancy(key.up, key.threads("up"), direct_up_bytes(key)),
    )  # fmt: skip
    direct_down_kernel(
        ids, weights, g_map, map_length, map_bytes, experts, factor, descriptors, words, g_table, middle_scales,
        gate_bias, up_bias, output_scales, down_bias, out, scratch, max_tokens, key,
    ).launch(
        grid=[key.padded_hidden // BLOCK // key.down.blocks, tokens * key.top_k, 1],
        block=[key.threads("down"), 1, 1],
        stream=stream,
        use_pdl=key.overlaps,
        **_occupancy(key.down, key.threads("down"), direct_down_bytes(key)),
    )  # fmt: skip


@cute.jit
def _launch_grouped(
    x: Int64,
    ids: Int64,
    weights: Int64,
    g_map: Int64,
    words: Int64,
    g_table: Int64,
    descriptors: Int64,
    input_scales: Int64,
    middle_scales: Int64,
    output_scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    down_bias: Int64,
    out: Int64,
    scratch: Int64,
    tokens: Int32,
    max_tokens: Int32,
    groups: Int32,
    blocks: Int32,
    map_length: Int32,
    map_bytes: Int32,
    experts: Int32,
    factor: Float32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    route_kernel(
        x, ids, weights, g_map, map_length, map_bytes, experts, factor, descriptors, input_scales, out, scratch, tokens,
        max_tokens, key,
    ).launch(grid=[blocks, 1, 1], block=[ROUTE_THREADS, 1, 1], stream=stream, use_pdl=key.overlaps)  # fmt: skip
    up_kernel(words, g_table, middle_scales, gate_bias, up_bias, scratch, max_tokens, key).launch(
        grid=[key.width // BLOCK // key.up.blocks * key.up.split, groups, 1],
        block=[key.threads("up"), 1, 1],
        stream=stream,
        use_pdl=key.overlaps,
        **_occupancy(key.up, key.threads("up"), up_shared_bytes(key)),
    )
    down_kernel(words, g_table, output_scales, down_bias, out, scratch, max_tokens, key).launch(
        grid=[key.padded_hidden // BLOCK // key.down.blocks * key.down.split, groups, 1],
        block=[key.threads("down"), 1, 1],
        stream=stream,
        use_pdl=key.overlaps,
        **_occupancy(key.down, key.threads("down"), down_shared_bytes(key)),
    )


def build(key: MoeSmallKey, options: str) -> Any:
    """Compile the three kernels of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of 15 addresses, tokens, capacity, groups, blocks, length and value bytes of the map, experts,
        factor and a stream.
    """
    return cute.compile(
        _host,
        *[Int64(0)] * _ADDRESSES,
        *[Int32(1)] * _INTEGERS,
        Float32(1.0),
        key,
        cuda.CUstream(0),
        options=options,
    )


def load(key: MoeSmallKey) -> None:
    """Put the table of a key's codebook on the current device, so that a launch has nothing left to copy."""
    if key.codebook in TABLE_CODEBOOKS:
        table_address(key.codebook, "compact", torch.cuda.current_device())


_X, _IDS, _WEIGHTS, _MAP, _FIXED, _OUT = 0, 1, 2, 3, 4, 13
_TOKENS, _CAPACITY, _GROUPS, _BLOCKS, _MAP_LENGTH, _MAP_BYTES, _EXPERTS, _FACTOR, _STREAM = range(
    _ADDRESSES, _ADDRESSES + _INTEGERS + 2
)
_KINDS = ("address",) * _ADDRESSES + ("int",) * _INTEGERS + ("float",)


class MoeSmall:
    """A layer with its kernels, addresses and scratch fixed, which launches for any tokens up to its capacity.

    Three launches that synchronise with nothing and may be captured.  A row's bits depend on its own token, experts and
    weights and on the key, not on its place in the batch nor on the other rows.  Launches of one instance, and of all
    that share a scratch, must be ordered by their streams; an instance is not for two threads at once.

    Args:
        experts: the layer, on a CUDA device.
        key: which kernels; `plan_moe_small` makes one.
        max_tokens: capacity.
        scratch: `[bytes] uint8`, at least `scratch_nbytes(key, max_tokens)`, 128-byte aligned, with any content.
        keep: whether to keep experts and scratch alive; otherwise the caller does.

    Raises:
        KernelTypeError: if a dtype or device is wrong.
        KernelValueError: if a size or alignment is wrong, or the experts are not those of the key.
        ColdKernelError: if the kernels are not ready and may not be compiled, frozen or under capture.
    """

    def __init__(
        self,
        experts: PreparedExperts,
        *,
        key: MoeSmallKey,
        max_tokens: int,
        scratch: torch.Tensor,
        keep: bool = True,
    ) -> None:
        _check_experts(experts, key)
        _check_scratch(experts, key, max_tokens, scratch)
        self.key, self.max_tokens = key, max_tokens
        self._experts = experts.source.geometry.num_experts
        self._kept = (experts, scratch) if keep else None
        self._device = experts.codes.device
        self._dtypes = (_DTYPES[key.x_dtype], _DTYPES[key.out_dtype], _DTYPES[key.weight_dtype])
        self._id_dtype = torch.int32 if key.id_bytes == 4 else torch.int64
        biases = [experts.biases.get(projection) for projection in Projection]
        fixed = (
            experts.codes, experts.descriptors, experts.input_scales, experts.intermediate_scales,
            experts.output_scales, *biases,
        )  # fmt: skip
        with torch.cuda.device(self._device):
            self._call = ArgumentSlots(compiler.ready(key), _KINDS, cuda.CUstream(0))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in fixed]
        addresses.insert(1, table_address(key.codebook, "compact", self._device.index))
        for index, address in enumerate(addresses):
            self._call.set(_FIXED + index, address)
        self._call.set(_OUT + 1, scratch.data_ptr())
        self._call.set(_CAPACITY, max_tokens)
        self._call.set(_EXPERTS, self._experts)

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Launch on the current stream of the device.

        Args:
            x: `[tokens, hidden]`, the key's `x_dtype`, contiguous, 16-byte aligned.
            topk_ids: `[tokens, top_k] int32 or int64`, contiguous; an id that is no expert adds nothing.
            topk_weights: `[tokens, top_k]`, the key's `weight_dtype`, contiguous.
            out: `[tokens, hidden]`, the key's `out_dtype`, contiguous, 16-byte aligned, written whole.
            expert_map: `[global experts] int32 or int64`, contiguous: local expert of each global id, -1 for none; None
                is the identity.
            factor: multiplies every router weight.

        Returns:
            `out`.

        Raises:
            KernelTypeError: if a dtype or device is wrong.
            KernelValueError: if a shape, stride or alignment is wrong, or there are more tokens than the capacity.
        """
        self._check(x, topk_ids, topk_weights, out, expert_map)
        tokens = x.shape[0]
        if tokens == 0:
            return out
        call = self._call
        for index, tensor in ((_X, x), (_IDS, topk_ids), (_WEIGHTS, topk_weights), (_OUT, out)):
            call.set(index, tensor.data_ptr())
        call.set(_TOKENS, tokens)
        call.set(_GROUPS, self.key.most_groups(tokens, self._experts))
        call.set(_BLOCKS, route_blocks(self.key, tokens))
        call.set(_MAP, 0 if expert_map is None else expert_map.data_ptr())
        call.set(_MAP_LENGTH, self._experts if expert_map is None else expert_map.numel())
        call.set(_MAP_BYTES, 0 if expert_map is None else expert_map.element_size())
        call.set(_FACTOR, factor)
        call.set(_STREAM, torch.cuda.current_stream(self._device).cuda_stream)
        if torch.cuda.current_device() == self._device.index:
            call()
        else:
            with torch.cuda.device(self._device):
                call()
        return out

    def _check(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        key = self.key
        x_dtype, out_dtype, weight_dtype = self._dtypes
        tokens = x.shape[0] if x.ndim else 0
        wanted = (
            ("x", x, x_dtype, key.hidden),
            ("out", out, out_dtype, key.hidden),
            ("topk_ids", topk_ids, self._id_dtype, key.top_k),
            ("topk_weights", topk_weights, weight_dtype, key.top_k),
        )
        for name, tensor, dtype, channels in wanted:
            if tensor.dtype != dtype or tensor.shape != (tokens, channels) or tensor.device != self._device:
                check_dtype(name, tensor, dtype)
                check_shape(name, tensor, tokens, channels)
                check_device(self._device, **{name: tensor})
            if not tensor.is_contiguous():
                raise KernelValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        for name, tensor in (("x", x), ("out", out)):
            if tensor.data_ptr() % _ALIGNMENT:
                past = tensor.data_ptr() % _ALIGNMENT
                raise KernelValueError(f"{name} must start at a multiple of {_ALIGNMENT} bytes, got {past} past one")
        if tokens > self.max_tokens:
            raise KernelValueError(f"{tokens} tokens do not fit a capacity of {self.max_tokens}")
        if expert_map is not None:
            check_dtype("expert_map", expert_map, torch.int32, torch.int64)
            check_shape("expert_map", expert_map, None)
            check_device(self._device, expert_map=expert_map)
            if not expert_map.is_contiguous():
                raise KernelValueError(f"expert_map must be contiguous, got strides {expert_map.stride()}")


def moe_small(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    key: MoeSmallKey,
    max_tokens: int,
    scratch: torch.Tensor,
    out: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """The routed experts of a layer; arguments and errors are those of `MoeSmall`.

    What a `MoeSmall` fixes is kept for the next call with the same experts, key, capacity and scratch.

    Returns:
        `out`, `[tokens, hidden]`.
    """
    known = _bound.setdefault(experts, {})
    place = (key, max_tokens, scratch.data_ptr(), scratch.numel())
    if place not in known:
        known[place] = MoeSmall(experts, key=key, max_tokens=max_tokens, scratch=scratch, keep=False)
    return known[place](x, topk_ids, topk_weights, out, expert_map=expert_map, factor=factor)


_bound: WeakKeyDictionary[PreparedExperts, dict[tuple[MoeSmallKey, int, int, int], MoeSmall]] = WeakKeyDictionary()


def _check_scratch(experts: PreparedExperts, key: MoeSmallKey, max_tokens: int, scratch: torch.Tensor) -> None:
    device = experts.codes.device
    if device.type != "cuda":
        raise KernelTypeError(f"the experts must be on a CUDA device, got {device}")
    check_dtype("scratch", scratch, torch.uint8)
    check_device(device, scratch=scratch)
    need = scratch_nbytes(key, max_tokens)
    if scratch.numel() < need:
        raise KernelValueError(f"scratch has {scratch.numel()} bytes; {max_tokens} tokens need {need}")
    if scratch.data_ptr() % HEADER_BYTES:
        past = scratch.data_ptr() % HEADER_BYTES
        raise KernelValueError(f"scratch must start at a multiple of {HEADER_BYTES} bytes, got {past} past one")
    if key.most_groups(max_tokens) > _MOST_GRID_Y:
        groups = key.most_groups(max_tokens)
        raise KernelValueError(f"{max_tokens} tokens may take {groups} groups, at most {_MOST_GRID_Y} fit")


def _check_experts(experts: PreparedExperts, key: MoeSmallKey) -> None:
    source, geometry = experts.source, experts.source.geometry
    found = {
        "codebook": source.codebook,
        "hidden": geometry.hidden_size,
        "padded_hidden": geometry.padded_hidden_size,
        "width": experts.extent.width,
        "max_experts": expert_class(geometry.num_experts),
        "gated": geometry.gated,
        "shared_inputs": source.shared_input_scales,
        "joint_inputs": source.joint_input_scales,
        "shared_outputs": source.shared_output_scales,
        "biased": tuple(projection in experts.biases for projection in Projection),
    }
    for name, value in found.items():
        if getattr(key, name) != value:
            raise KernelValueError(f"the key has {name} = {getattr(key, name)}, the experts {value}")
