"""Owns the kernel that sums each token's route rows in slot order, and the arguments of its launch.

It must not know tensors, codes or how routes were packed.  Rows are float16, half of what float32 rows would move, and
rows of dropped routes hold anything: a route counts when its id is that of an expert of this rank, which is looked up
here as packing does.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import values, wgmma
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.prefill_key import PrefillReduceKey

__all__ = ["build"]

_THREADS = 128
_SLOTS_AT_ONCE = 4


@cute.kernel
def _reduce_kernel(
    rows: Int64,
    ids: Int64,
    weights: Int64,
    expert_map: Int64,
    out: Int64,
    top_k: Int32,
    experts: Int32,
    map_length: Int32,
    map_bytes: Int32,
    padded: Int32,
    channels: Int32,
    id_bytes: Int32,
    factor: Float32,
    key: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    token, chunk, _ = cute.arch.block_idx()
    column = (chunk * _THREADS + thread) * values.CHUNK
    inside = cutlass.min(column, padded - values.CHUNK)
    first = token * top_k
    r_sums = cute.make_rmem_tensor(cute.make_layout((values.CHUNK,)), Float32)
    r_sums.fill(0.0)
    for slot in cutlass.range(0, top_k, _SLOTS_AT_ONCE, unroll=1):
        terms, factors, lives = [], [], []
        for ahead in cutlass.range_constexpr(_SLOTS_AT_ONCE):
            route = first + cutlass.min(slot + ahead, top_k - 1)
            expert = values.load_index(ids, route, id_bytes, Int32(-1))
            if map_length > 0:
                known = Int32(expert >= 0) * Int32(expert < map_length)
                mapped = values.load_index(expert_map, expert * known, map_bytes, Int32(-1))
                expert = mapped * known + (known - 1)
            lives.append(Boolean(expert >= 0) & Boolean(expert < experts) & Boolean(slot + ahead < top_k))
            factors.append(
                values.load_value(weights + Int64(route * VALUE_BYTES[key.weight_dtype]), key.weight_dtype) * factor
            )
            terms.append(gpu.load_words(rows + (Int64(route) * Int64(padded) + Int64(inside)) * 2, 4, read_only=False))
        for ahead in cutlass.range_constexpr(_SLOTS_AT_ONCE):
            row = [
                value for word in values.keep(terms[ahead], lives[ahead]) for value in gpu.floats_from(word, "float16")
            ]
            scale = wgmma.pick(Int32(lives[ahead]), Float32(0.0), factors[ahead])
            for index in cutlass.range_constexpr(values.CHUNK):
                r_sums[index] = gpu.fma(row[index], scale, r_sums[index])
    g_out = out + (Int64(token) * Int64(channels) + Int64(column)) * VALUE_BYTES[key.out_dtype]
    values.store_chunk(
        g_out, [r_sums[index] for index in range(values.CHUNK)], key.out_dtype, Boolean(column < channels)
    )


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _reduce_host(
    rows: Int64,
    ids: Int64,
    weights: Int64,
    expert_map: Int64,
    out: Int64,
    tokens: Int32,
    top_k: Int32,
    experts: Int32,
    map_length: Int32,
    map_bytes: Int32,
    padded: Int32,
    channels: Int32,
    id_bytes: Int32,
    factor: Float32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    span = _THREADS * values.CHUNK
    _reduce_kernel(
        rows,
        ids,
        weights,
        expert_map,
        out,
        top_k,
        experts,
        map_length,
        map_bytes,
        padded,
        channels,
        id_bytes,
        factor,
        key,
    ).launch(grid=[tokens, (channels + span - 1) // span, 1], block=[_THREADS, 1, 1], stream=stream)


def build(key: PrefillReduceKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (5 addresses, 8 numbers, factor, stream) in the order of the host function above.
    """
    return cute.compile(
        _reduce_host, *[Int64(0)] * 5, *[Int32(1)] * 8, Float32(1.0), key, cuda.CUstream(0), options=options
    )
