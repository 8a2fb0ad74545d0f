"""Owns the fused forward of an expert layer for few tokens: its three launches, and the checks before them.

It must not know checkpoints, plans or how a key is chosen.  The launches are `moe_route` (groups and rotated inputs),
`moe_up` (gate, up and all between the GEMMs) and `moe_down` (down, weights and the ordered sum).  Each begins while the
one before it drains, and waits for its memory.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_format.source import Projection
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.cute import compiler
from trellis_kernels.cute.moe_down import down_kernel, down_shared_bytes
from trellis_kernels.cute.moe_key import MoeSmallKey, Tiling, scratch_nbytes
from trellis_kernels.cute.moe_route import ROUTE_THREADS, route_blocks, route_kernel
from trellis_kernels.cute.moe_up import up_kernel, up_shared_bytes
from trellis_kernels.errors import KernelTypeError, KernelValueError
from trellis_prep import PreparedExperts

__all__ = ["build", "moe_small"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SHARED_PER_SM_KIB = 228
_POINTERS = 15
_MOST_GRID_Y = 65535


def _carveout(shared_bytes: int, resident: int) -> int:
    """Percent of an SM's shared memory that the resident blocks need, with the 1 KiB that each one reserves."""
    need = resident * (shared_bytes + 1024)
    return min(100, -(-need * 100 // (_SHARED_PER_SM_KIB * 1024)))


def _occupancy(tiling: Tiling, shared_bytes: int) -> dict[str, int]:
    if tiling.resident == 1:
        return {}
    return {
        "min_blocks_per_mp": tiling.resident,
        "preferred_smem_carveout": _carveout(shared_bytes, tiling.resident),
    }


@cute.jit
def _host(
    x: Int64,
    ids: Int64,
    weights: Int64,
    words: Int64,
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
    factor: Float32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    route_kernel(x, ids, input_scales, out, scratch, tokens, max_tokens, key).launch(
        grid=[blocks, 1, 1], block=[ROUTE_THREADS, 1, 1], stream=stream, use_pdl=True
    )
    up_kernel(words, descriptors, middle_scales, gate_bias, up_bias, scratch, max_tokens, key).launch(
        grid=[key.width // BLOCK // key.up.blocks * key.up.split, groups, 1],
        block=[key.threads("up"), 1, 1],
        stream=stream,
        use_pdl=True,
        **_occupancy(key.up, up_shared_bytes(key)),
    )
    down_kernel(
        words, descriptors, ids, weights, output_scales, down_bias, out, factor, scratch, max_tokens, key
    ).launch(
        grid=[key.padded_hidden // BLOCK // key.down.blocks * key.down.split, groups, 1],
        block=[key.threads("down"), 1, 1],
        stream=stream,
        use_pdl=True,
        **_occupancy(key.down, down_shared_bytes(key)),
    )


def build(key: MoeSmallKey, options: str) -> Any:
    """Compile the three kernels of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of 13 addresses, tokens, capacity, groups, blocks, factor and a stream.
    """
    return cute.compile(
        _host,
        *[Int64(0)] * 13,
        *[Int32(1)] * 4,
        Float32(1.0),
        key,
        cuda.CUstream(0),
        options=options,
    )


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
    factor: float = 1.0,
) -> torch.Tensor:
    """The routed experts of a layer, on the current stream, in three launches that synchronise with nothing.

    Products of exact fp16 code values and fp16 activations are summed in fp32.  A row's bits depend on its own token,
    experts and weights and on the key, not on its place in the batch nor on the other rows.

    Args:
        x: `[tokens, hidden]`, the key's `x_dtype`, contiguous.
        experts: the layer on the same device.
        topk_ids: `[tokens, top_k] int32 or int64`, contiguous; an id outside [0, experts) adds nothing.
        topk_weights: `[tokens, top_k]`, the key's `weight_dtype`, contiguous.
        key: which kernels; `plan_moe_small` makes one.
        max_tokens: capacity that the scratch was sized for.
        scratch: `[bytes] uint8`, at least `scratch_nbytes(key, max_tokens)`, 128-byte aligned, with any content; not
            shared with another launch that may run at the same time.
        out: `[tokens, hidden]`, the key's `out_dtype`, contiguous, written whole.
        factor: multiplies every router weight.

    Returns:
        `out`.

    Raises:
        KernelTypeError: if a dtype or device is wrong.
        KernelValueError: if a shape, stride, size or alignment is wrong, or the experts are not those of the key.
        ColdKernelError: if the kernels are not ready and may not be compiled, frozen or under capture.
    """
    _check(x, experts, topk_ids, topk_weights, key, max_tokens, scratch, out)
    tokens = x.shape[0]
    if tokens == 0:
        return out
    biases = [experts.biases.get(projection) for projection in Projection]
    tensors = (
        x, topk_ids, topk_weights, experts.codes, experts.descriptors, experts.input_scales,
        experts.intermediate_scales, experts.output_scales, *biases, out, scratch,
    )  # fmt: skip
    with torch.cuda.device(x.device):
        kernel = compiler.ready(key)
        kernel(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            tokens,
            max_tokens,
            key.most_groups(tokens),
            route_blocks(key, tokens),
            factor,
            cuda.CUstream(torch.cuda.current_stream().cuda_stream),
        )
    return out


def _check(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    key: MoeSmallKey,
    max_tokens: int,
    scratch: torch.Tensor,
    out: torch.Tensor,
) -> None:
    check_dtype("x", x, _DTYPES[key.x_dtype])
    check_dtype("out", out, _DTYPES[key.out_dtype])
    check_dtype("topk_weights", topk_weights, _DTYPES[key.weight_dtype])
    check_dtype("topk_ids", topk_ids, torch.int32 if key.id_bytes == 4 else torch.int64)
    check_dtype("scratch", scratch, torch.uint8)
    check_shape("x", x, None, key.hidden)
    tokens = x.shape[0]
    check_shape("out", out, tokens, key.hidden)
    check_shape("topk_ids", topk_ids, tokens, key.top_k)
    check_shape("topk_weights", topk_weights, tokens, key.top_k)
    if x.device.type != "cuda":
        raise KernelTypeError(f"x must be on a CUDA device, got {x.device}")
    check_device(
        x.device, out=out, topk_ids=topk_ids, topk_weights=topk_weights, scratch=scratch, codes=experts.codes
    )
    for name, tensor in (("x", x), ("out", out), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if not tensor.is_contiguous():
            raise KernelValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    for name, tensor, unit in (("x", x, 16), ("out", out, 16), ("scratch", scratch, 128)):
        if tensor.data_ptr() % unit:
            raise KernelValueError(f"{name} must start at a multiple of {unit} bytes, got {tensor.data_ptr() % unit} past one")
    if tokens > max_tokens:
        raise KernelValueError(f"{tokens} tokens do not fit a capacity of {max_tokens}")
    need = scratch_nbytes(key, max_tokens)
    if scratch.numel() < need:
        raise KernelValueError(f"scratch has {scratch.numel()} bytes; {max_tokens} tokens need {need}")
    if key.most_groups(tokens) > _MOST_GRID_Y:
        raise KernelValueError(f"{tokens} tokens may take {key.most_groups(tokens)} groups, at most {_MOST_GRID_Y} fit")
    _check_experts(experts, key)


def _check_experts(experts: PreparedExperts, key: MoeSmallKey) -> None:
    source, geometry = experts.source, experts.source.geometry
    found = {
        "codebook": source.codebook,
        "hidden": geometry.hidden_size,
        "padded_hidden": geometry.padded_hidden_size,
        "width": experts.extent.width,
        "num_experts": geometry.num_experts,
        "gated": geometry.gated,
        "shared_inputs": source.shared_input_scales,
        "joint_inputs": source.joint_input_scales,
        "shared_outputs": source.shared_output_scales,
        "biased": tuple(projection in experts.biases for projection in Projection),
    }
    for name, value in found.items():
        if getattr(key, name) != value:
            raise KernelValueError(f"the key has {name} = {getattr(key, name)}, the experts {value}")
