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
from cutlass import Constexpr, Int32

from trellis_format.source import Projection
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.cute import compiler
from trellis_kernels.cute.argument_slots import ArgumentSlots
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.decode import table_address
from trellis_kernels.cute.moe_arguments import MoeArguments
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
def _host(args: MoeArguments, key: Constexpr, stream: cuda.CUstream):
    if cutlass.const_expr(key.direct):
        routes = args.tokens * key.top_k
        _launch(direct_up_kernel, "up", routes, direct_up_bytes, args, key, stream)
        _launch(direct_down_kernel, "down", routes, direct_down_bytes, args, key, stream)
    else:
        route_kernel(key, args).launch(
            grid=[args.blocks, 1, 1], block=[ROUTE_THREADS, 1, 1], stream=stream, use_pdl=key.overlaps
        )
        _launch(up_kernel, "up", args.groups, up_shared_bytes, args, key, stream)
        _launch(down_kernel, "down", args.groups, down_shared_bytes, args, key, stream)


def _launch(
    kernel: Any, gemm: str, rows: Int32, shared_bytes: Any, args: MoeArguments, key: MoeSmallKey, stream: cuda.CUstream
) -> None:
    """One GEMM: thread blocks of every column by groups or routes."""
    threads = key.threads(gemm)
    kernel(key, args).launch(
        grid=[key.columns(gemm), rows, 1],
        block=[threads, 1, 1],
        stream=stream,
        use_pdl=key.overlaps,
        **_occupancy(key.tiling(gemm), threads, shared_bytes(key)),
    )


def build(key: MoeSmallKey, options: str) -> Any:
    """Compile the kernels of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `MoeArguments` and a stream.
    """
    return cute.compile(_host, blank(MoeArguments), key, cuda.CUstream(0), options=options)


def load(key: MoeSmallKey) -> None:
    """Put the table of a key's codebook on the current device, so that a launch has nothing left to copy."""
    if key.codebook in TABLE_CODEBOOKS:
        table_address(key.codebook, "compact", torch.cuda.current_device())


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
        fixed = {
            "words": experts.codes,
            "descriptors": experts.descriptors,
            "input_scales": experts.input_scales,
            "middle_scales": experts.intermediate_scales,
            "output_scales": experts.output_scales,
            "scratch": scratch,
            **{f"{projection}_bias": tensor for projection, tensor in experts.biases.items()},
        }
        with torch.cuda.device(self._device):
            self._call = ArgumentSlots(compiler.ready(key), MoeArguments, cuda.CUstream(0))
        self._call.set(
            g_table=table_address(key.codebook, "compact", self._device.index),
            max_tokens=max_tokens,
            experts=self._experts,
            **{name: tensor.data_ptr() for name, tensor in fixed.items()},
        )

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
        call.set(
            x=x.data_ptr(),
            ids=topk_ids.data_ptr(),
            weights=topk_weights.data_ptr(),
            out=out.data_ptr(),
            tokens=tokens,
            groups=self.key.most_groups(tokens, self._experts),
            blocks=route_blocks(self.key, tokens),
            g_map=0 if expert_map is None else expert_map.data_ptr(),
            map_length=self._experts if expert_map is None else expert_map.numel(),
            map_bytes=0 if expert_map is None else expert_map.element_size(),
            factor=factor,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
        )
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
