"""Owns the reduction kernels and their launches: each token's weighted routes, summed in order or by atomic additions.

It must not know experts.

The ordered sum reads each route row once and writes each token once; a lane adds its channels slot after slot, so its
bits are those of the torch backend.  The atomic sum is for producers that do not hold a token's routes together: each
term is rounded to the output's dtype and added to a float32 row in any order, and the rows in use are copied out.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_kernels.arguments import check_reduce_routes
from trellis_kernels.cute import compiler, values
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.launch import DTYPE_NAMES, check_cuda, check_rows, is_wide
from trellis_kernels.cute.op_keys import ReduceKey

__all__ = ["build", "reduce_routes"]

_THREADS = 128
_SLOTS_AT_ONCE = 4


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _load(g_row: Int64, column: Int32, channels: Int32, dtype: str, wide: bool) -> list[Float32]:
    """A chunk of a row; what lies beyond the channels repeats values inside and is never stored."""
    value_bytes = VALUE_BYTES[dtype]
    if wide:
        return values.load_chunk(g_row + Int64(column * value_bytes), dtype)
    return [
        values.load_value(g_row + Int64(cutlass.min(column + index, channels - 1) * value_bytes), dtype)
        for index in range(values.CHUNK)
    ]


def _store(g_row: Int64, column: Int32, channels: Int32, chunk: list[Float32], dtype: str, wide: bool) -> None:
    value_bytes = VALUE_BYTES[dtype]
    if wide:
        values.store_chunk(g_row + Int64(column * value_bytes), chunk, dtype, Boolean(column < channels))
        return
    for index, value in enumerate(chunk):
        inside = Boolean(column + index < channels)
        values.store_value(g_row + Int64((column + index) * value_bytes), value, dtype, inside)


@cute.kernel
def _ordered_kernel(
    rows: Int64,
    weights: Int64,
    out: Int64,
    top_k: Int32,
    channels: Int32,
    row_pitch: Int32,
    weight_pitch: Int32,
    out_pitch: Int32,
    factor: Float32,
    weight_dtype: Constexpr,
    out_dtype: Constexpr,
    wide: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    token, group, _ = cute.arch.block_idx()
    column = (group * _THREADS + thread) * values.CHUNK
    if column < channels:
        g_weights = weights + Int64(token) * Int64(weight_pitch * VALUE_BYTES[weight_dtype])
        g_rows = rows + Int64(token) * Int64(top_k) * Int64(row_pitch * 4)
        r_sum = cute.make_rmem_tensor(cute.make_layout(values.CHUNK), Float32)
        for index in cutlass.range_constexpr(values.CHUNK):
            r_sum[index] = Float32(0.0)
        for slot in cutlass.range(top_k, unroll=_SLOTS_AT_ONCE):
            weight = values.load_value(g_weights + Int64(slot * VALUE_BYTES[weight_dtype]), weight_dtype)
            chunk = _load(g_rows + Int64(slot) * Int64(row_pitch * 4), column, channels, "float32", wide)
            weight = values.multiply(weight, factor)
            for index in cutlass.range_constexpr(values.CHUNK):
                r_sum[index] = values.add(r_sum[index], values.multiply(chunk[index], weight))
        g_out = out + Int64(token) * Int64(out_pitch * VALUE_BYTES[out_dtype])
        _store(g_out, column, channels, [r_sum[index] for index in range(values.CHUNK)], out_dtype, wide)


@cute.kernel
def _zero_kernel(accumulator: Int64, channels: Int32, pitch: Int32):
    thread, _, _ = cute.arch.thread_idx()
    token, group, _ = cute.arch.block_idx()
    column = (group * _THREADS + thread) * values.CHUNK
    zeros = [Float32(0.0) for _ in range(values.CHUNK)]
    _store(accumulator + Int64(token) * Int64(pitch * 4), column, channels, zeros, "float32", True)


@cute.kernel
def _accumulate_kernel(
    rows: Int64,
    weights: Int64,
    accumulator: Int64,
    top_k: Int32,
    channels: Int32,
    row_pitch: Int32,
    weight_pitch: Int32,
    accumulator_pitch: Int32,
    factor: Float32,
    weight_dtype: Constexpr,
    out_dtype: Constexpr,
    has_vector: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    route, group, _ = cute.arch.block_idx()
    column = (group * _THREADS + thread) * values.CHUNK
    if column < channels:
        token = route // top_k
        place = Int64(token) * Int64(weight_pitch) + Int64(route % top_k)
        weight = values.load_value(weights + place * VALUE_BYTES[weight_dtype], weight_dtype)
        weight = values.multiply(weight, factor)
        chunk = _load(rows + Int64(route) * Int64(row_pitch * 4), column, channels, "float32", True)
        terms = [values.rounded(values.multiply(value, weight), out_dtype) for value in chunk]
        g_sum = accumulator + Int64(token) * Int64(accumulator_pitch * 4) + Int64(column * 4)
        for half in cutlass.range_constexpr(2):
            values.accumulate(g_sum + 16 * half, terms[4 * half : 4 * half + 4], has_vector)


@cute.kernel
def _copy_kernel(
    accumulator: Int64,
    out: Int64,
    channels: Int32,
    accumulator_pitch: Int32,
    out_pitch: Int32,
    out_dtype: Constexpr,
    wide: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    token, group, _ = cute.arch.block_idx()
    column = (group * _THREADS + thread) * values.CHUNK
    if column < channels:
        chunk = _load(accumulator + Int64(token) * Int64(accumulator_pitch * 4), column, channels, "float32", wide)
        _store(out + Int64(token) * Int64(out_pitch * VALUE_BYTES[out_dtype]), column, channels, chunk, out_dtype, wide)


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _host(
    rows: Int64,
    weights: Int64,
    accumulator: Int64,
    out: Int64,
    tokens: Int32,
    top_k: Int32,
    channels: Int32,
    row_pitch: Int32,
    weight_pitch: Int32,
    accumulator_pitch: Int32,
    out_pitch: Int32,
    factor: Float32,
    stage: Constexpr,
    weight_dtype: Constexpr,
    out_dtype: Constexpr,
    wide: Constexpr,
    has_vector: Constexpr,
    stream: cuda.CUstream,
):
    groups = (channels + _THREADS * values.CHUNK - 1) // (_THREADS * values.CHUNK)
    block = [_THREADS, 1, 1]
    if cutlass.const_expr(stage == "ordered"):
        _ordered_kernel(
            rows,
            weights,
            out,
            top_k,
            channels,
            row_pitch,
            weight_pitch,
            out_pitch,
            factor,
            weight_dtype,
            out_dtype,
            wide,
        ).launch(grid=[tokens, groups, 1], block=block, stream=stream)
    elif cutlass.const_expr(stage == "zero"):
        _zero_kernel(accumulator, channels, accumulator_pitch).launch(
            grid=[tokens, groups, 1], block=block, stream=stream
        )
    elif cutlass.const_expr(stage == "accumulate"):
        _accumulate_kernel(
            rows,
            weights,
            accumulator,
            top_k,
            channels,
            row_pitch,
            weight_pitch,
            accumulator_pitch,
            factor,
            weight_dtype,
            out_dtype,
            has_vector,
        ).launch(grid=[tokens * top_k, groups, 1], block=block, stream=stream)
    else:
        _copy_kernel(accumulator, out, channels, accumulator_pitch, out_pitch, out_dtype, wide).launch(
            grid=[tokens, groups, 1], block=block, stream=stream
        )


def build(key: ReduceKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of the runtime arguments of `_host`: addresses, then numbers, the factor, and the stream.
    """
    return cute.compile(
        _host,
        *(Int64(0) for _ in range(4)),
        *(Int32(1) for _ in range(7)),
        Float32(1.0),
        key.stage,
        key.weight_dtype,
        key.out_dtype,
        key.wide,
        key.arch != "sm_80",
        cuda.CUstream(0),
        options=options,
    )


def reduce_routes(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    factor: float = 1.0,
    accumulator: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Sum each token's weighted routes; see `trellis_kernels.ops.reduce_routes`.

    Bits of the ordered sum are those of the torch backend.  All matrices may have any distance between rows.

    Raises:
        KernelTypeError, KernelValueError: as the op; also if rows are not contiguous, or those of an accumulator or of
            the routes added to it not aligned to 16 bytes.
        KernelUnsupportedError, ColdKernelError: as every kernel.
    """
    check_cuda("rows", rows)
    check_reduce_routes(rows, topk_weights, accumulator, out)
    tokens, top_k = topk_weights.shape
    channels = out.shape[1]
    if out.numel() == 0:
        return out
    if top_k == 0:
        return out.zero_()
    atomic = accumulator is not None
    check_rows(aligned=atomic, rows=rows, accumulator=accumulator)
    check_rows(aligned=False, topk_weights=topk_weights, out=out)
    stages = ("zero", "accumulate", "copy") if atomic else ("ordered",)
    wide = is_wide(out) and (atomic or is_wide(rows))
    stream = torch.cuda.current_stream(out.device).cuda_stream
    with torch.cuda.device(out.device):
        for stage in stages:
            kernel = compiler.ready(_key(stage, topk_weights, out, wide))
            kernel(
                rows.data_ptr(),
                topk_weights.data_ptr(),
                0 if accumulator is None else accumulator.data_ptr(),
                out.data_ptr(),
                tokens,
                top_k,
                channels if stage in ("ordered", "copy") else -(-channels // values.CHUNK) * values.CHUNK,
                rows.stride(0),
                topk_weights.stride(0),
                0 if accumulator is None else accumulator.stride(0),
                out.stride(0),
                float(factor),
                cuda.CUstream(stream),
            )
    return out


def _key(stage: str, topk_weights: torch.Tensor, out: torch.Tensor, wide: bool) -> ReduceKey:
    """The key of a stage; what the stage does not read has one fixed value."""
    return ReduceKey(
        arch=arch_of_device(out.device.index).name,
        stage=stage,
        weight_dtype=DTYPE_NAMES[topk_weights.dtype] if stage in ("ordered", "accumulate") else "float32",
        out_dtype="float32" if stage == "zero" else DTYPE_NAMES[out.dtype],
        wide=wide if stage in ("ordered", "copy") else True,
    )
