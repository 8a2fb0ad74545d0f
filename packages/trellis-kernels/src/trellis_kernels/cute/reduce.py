"""Owns the reduction kernels and their launches: each token's weighted routes, summed in order or by atomic additions.

It must not know experts.

The ordered sum reads each route row once and writes each token once; a lane adds its channels slot after slot, so its
bits are those of the torch backend.  The atomic sum is for producers that do not hold a token's routes together: each
term is rounded to the output's dtype and added to a float32 row in any order, and the rows in use are copied out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_kernels.arguments import check_reduce_routes
from trellis_kernels.cute import values
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.launch import DTYPE_NAMES, check_cuda, check_rows, is_wide
from trellis_kernels.cute.launches import launch
from trellis_kernels.cute.op_keys import ReduceKey

__all__ = ["build", "reduce_routes"]

_THREADS = 128
_SLOTS_AT_ONCE = 4


class ReduceArguments(NamedTuple):
    """Arguments of every stage, which reads `rows` and writes `out`; a pitch is in elements from row to row."""

    rows: Int64
    weights: Int64
    out: Int64
    top_k: Int32
    channels: Int32
    row_pitch: Int32
    weight_pitch: Int32
    out_pitch: Int32
    factor: Float32
    tokens: Int32


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


def _offset(index: Any, pitch: Int32, dtype: str = "float32") -> Int64:
    """Bytes from the first row of a matrix to another."""
    return Int64(index) * Int64(pitch * VALUE_BYTES[dtype])


def _place() -> tuple[Int32, Int32]:
    """This thread's row and first channel."""
    thread, _, _ = cute.arch.thread_idx()
    row, group, _ = cute.arch.block_idx()
    return row, (group * _THREADS + thread) * values.CHUNK


@cute.kernel
def _ordered_kernel(key: Constexpr, args: ReduceArguments):
    token, column = _place()
    channels = args.channels
    if column < channels:
        g_weights = args.weights + _offset(token, args.weight_pitch, key.weight_dtype)
        g_rows = args.rows + Int64(token) * Int64(args.top_k) * Int64(args.row_pitch * 4)
        r_sum = cute.make_rmem_tensor(cute.make_layout(values.CHUNK), Float32)
        for index in cutlass.range_constexpr(values.CHUNK):
            r_sum[index] = Float32(0.0)
        for slot in cutlass.range(args.top_k, unroll=_SLOTS_AT_ONCE):
            weight = values.load_value(g_weights + Int64(slot * VALUE_BYTES[key.weight_dtype]), key.weight_dtype)
            chunk = _load(g_rows + _offset(slot, args.row_pitch), column, channels, "float32", key.wide)
            weight = values.multiply(weight, args.factor)
            for index in cutlass.range_constexpr(values.CHUNK):
                r_sum[index] = values.add(r_sum[index], values.multiply(chunk[index], weight))
        g_out = args.out + _offset(token, args.out_pitch, key.out_dtype)
        _store(g_out, column, channels, [r_sum[index] for index in range(values.CHUNK)], key.out_dtype, key.wide)


@cute.kernel
def _zero_kernel(_key: Constexpr, args: ReduceArguments):
    token, column = _place()
    zeros = [Float32(0.0) for _ in range(values.CHUNK)]
    _store(args.out + _offset(token, args.out_pitch), column, args.channels, zeros, "float32", True)


@cute.kernel
def _accumulate_kernel(key: Constexpr, args: ReduceArguments):
    route, column = _place()
    if column < args.channels:
        token = route // args.top_k
        place = Int64(token) * Int64(args.weight_pitch) + Int64(route % args.top_k)
        weight = values.load_value(args.weights + place * VALUE_BYTES[key.weight_dtype], key.weight_dtype)
        weight = values.multiply(weight, args.factor)
        chunk = _load(args.rows + _offset(route, args.row_pitch), column, args.channels, "float32", True)
        terms = [values.rounded(values.multiply(value, weight), key.out_dtype) for value in chunk]
        g_sum = args.out + _offset(token, args.out_pitch) + Int64(column * 4)
        for half in cutlass.range_constexpr(2):
            values.accumulate(g_sum + 16 * half, terms[4 * half : 4 * half + 4], key.arch != "sm_80")


@cute.kernel
def _copy_kernel(key: Constexpr, args: ReduceArguments):
    token, column = _place()
    channels = args.channels
    if column < channels:
        chunk = _load(args.rows + _offset(token, args.row_pitch), column, channels, "float32", key.wide)
        g_out = args.out + _offset(token, args.out_pitch, key.out_dtype)
        _store(g_out, column, channels, chunk, key.out_dtype, key.wide)


_KERNELS = {
    "ordered": _ordered_kernel,
    "zero": _zero_kernel,
    "accumulate": _accumulate_kernel,
    "copy": _copy_kernel,
}


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _host(args: ReduceArguments, key: Constexpr, stream: cuda.CUstream):
    groups = (args.channels + _THREADS * values.CHUNK - 1) // (_THREADS * values.CHUNK)
    rows = args.tokens * args.top_k if cutlass.const_expr(key.stage == "accumulate") else args.tokens
    _KERNELS[key.stage](key, args).launch(grid=[rows, groups, 1], block=[_THREADS, 1, 1], stream=stream)


def build(key: ReduceKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `ReduceArguments` and a stream.
    """
    return cute.compile(_host, blank(ReduceArguments), key, cuda.CUstream(0), options=options)


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
    for stage in stages:
        source = accumulator if stage == "copy" else rows
        target = accumulator if stage in ("zero", "accumulate") else out
        launch(
            _key(stage, topk_weights, out, wide),
            out.device,
            ReduceArguments,
            rows=source,
            weights=topk_weights,
            out=target,
            top_k=top_k,
            channels=channels if target is out else -(-channels // values.CHUNK) * values.CHUNK,
            row_pitch=source.stride(0),
            weight_pitch=topk_weights.stride(0),
            out_pitch=target.stride(0),
            factor=factor,
            tokens=tokens,
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
