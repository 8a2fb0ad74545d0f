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
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.prefill_arguments import SumArguments
from trellis_kernels.cute.prefill_key import PrefillReduceKey

__all__ = ["build"]

_THREADS = 128
_SLOTS_AT_ONCE = 4


@cute.kernel
def _reduce_kernel(key: Constexpr, args: SumArguments):
    thread, _, _ = cute.arch.thread_idx()
    token, chunk, _ = cute.arch.block_idx()
    column = (chunk * _THREADS + thread) * values.CHUNK
    inside = cutlass.min(column, args.padded - values.CHUNK)
    first = token * args.top_k
    r_sums = cute.make_rmem_tensor(cute.make_layout((values.CHUNK,)), Float32)
    r_sums.fill(0.0)
    for slot in cutlass.range(0, args.top_k, _SLOTS_AT_ONCE, unroll=1):
        terms, factors, lives = [], [], []
        for ahead in cutlass.range_constexpr(_SLOTS_AT_ONCE):
            route = first + cutlass.min(slot + ahead, args.top_k - 1)
            expert = values.load_index(args.ids, route, args.id_bytes, Int32(-1))
            if args.map_length > 0:
                known = Int32(expert >= 0) * Int32(expert < args.map_length)
                mapped = values.load_index(args.expert_map, expert * known, args.map_bytes, Int32(-1))
                expert = mapped * known + (known - 1)
            lives.append(Boolean(expert >= 0) & Boolean(expert < args.experts) & Boolean(slot + ahead < args.top_k))
            factors.append(
                values.load_value(args.weights + Int64(route * VALUE_BYTES[key.weight_dtype]), key.weight_dtype)
                * args.factor
            )
            terms.append(
                gpu.load_words(args.rows + (Int64(route) * Int64(args.padded) + Int64(inside)) * 2, 4, read_only=False)
            )
        for ahead in cutlass.range_constexpr(_SLOTS_AT_ONCE):
            row = [
                value for word in values.keep(terms[ahead], lives[ahead]) for value in gpu.floats_from(word, "float16")
            ]
            scale = wgmma.pick(Int32(lives[ahead]), Float32(0.0), factors[ahead])
            for index in cutlass.range_constexpr(values.CHUNK):
                r_sums[index] = gpu.fma(row[index], scale, r_sums[index])
    g_out = args.out + (Int64(token) * Int64(args.channels) + Int64(column)) * VALUE_BYTES[key.out_dtype]
    values.store_chunk(
        g_out, [r_sums[index] for index in range(values.CHUNK)], key.out_dtype, Boolean(column < args.channels)
    )


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _reduce_host(args: SumArguments, key: Constexpr, stream: cuda.CUstream):
    span = _THREADS * values.CHUNK
    _reduce_kernel(key, args).launch(
        grid=[args.tokens, (args.channels + span - 1) // span, 1], block=[_THREADS, 1, 1], stream=stream
    )


def build(key: PrefillReduceKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `SumArguments` and a stream.
    """
    return cute.compile(_reduce_host, blank(SumArguments), key, cuda.CUstream(0), options=options)
