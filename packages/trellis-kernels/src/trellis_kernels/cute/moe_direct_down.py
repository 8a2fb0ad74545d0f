"""Owns the second launch of a direct layer: what lies between the GEMMs, down of one route, and the sum over routes.

It must not know other tokens.  A thread block starts its weights before the launch before it has ended, and waits only
then.  It makes the whole joined row for itself, which costs a few rotations and spares a wait for other thread blocks.
The one whose row completes a token's block adds that token's rows in the order of its slots.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.gemm_share import STEP_CHANNELS
from trellis_kernels.cute.moe_arguments import MoeArguments, expert_of, live_routes, load_value
from trellis_kernels.cute.moe_direct_rows import LAW_WORDS, block_products, join_row, lane_offset, row_blocks
from trellis_kernels.cute.moe_gemm import (
    allocate,
    allocate_padding,
    fill_table,
    multiply_strip,
    padded_bytes,
    shared_bytes,
    table_bytes,
    warp_bytes,
)
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_middle import load_vectors
from trellis_kernels.cute.moe_result import (
    arrive,
    fetch_output_scales,
    load_output_scales,
    store_out,
    store_weighted,
    sum_token,
)
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, direct_scratch
from trellis_kernels.cute.moe_split import BLOCK_STRIPS

__all__ = ["direct_down_bytes", "direct_down_kernel"]


def direct_down_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return padded_bytes("down", _needed_bytes(key), key)


def _needed_bytes(key: MoeSmallKey) -> int:
    return shared_bytes("down", key) + 2 * key.width + 4 * LAW_WORDS + 4 * key.down.blocks + 16 + table_bytes(key)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


@cute.jit
def _finish(
    args: MoeArguments,
    arrivals: Int64,
    results: Int64,
    weight: Float32,
    live: Uint32,
    s_sums: Int32,
    s_law: Int32,
    s_flags: Int32,
    expert: Int32,
    route: Int32,
    first_block: Int32,
    thread: Int32,
    key: Constexpr,
):
    """This route's weighted row, of whole blocks; then a token's sum, where this row completes it."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = key.threads("down") // 32
    token = route // key.top_k
    for place in cutlass.range(warp, key.down.blocks, warps, unroll=1):
        channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
        svh = load_output_scales(args, expert, channel, key)
        sums = block_products(s_sums, s_law, lane, place * BLOCK_STRIPS, "down", key)
        store_weighted(args, results, sums, svh, weight, expert, route, channel, lane, key)
    cute.arch.sync_threads()
    if thread < key.down.blocks:
        arrive(arrivals, token, first_block + thread, live, s_flags + thread * 4, key)
    cute.arch.sync_threads()
    for place in cutlass.range(warp, key.down.blocks, warps, unroll=1):
        if gpu.load_shared_int(s_flags + place * 4) == 1:
            channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
            sum_token(args.out, results, token, live, channel, key)


@cute.jit
def _clear(out: Int64, token: Int32, first_block: Int32, thread: Int32, key: Constexpr):
    """Zeros for a token that no expert serves."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    for place in cutlass.range(warp, key.down.blocks, key.threads("down") // 32, unroll=1):
        zeros = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
        store_out(out, token, (first_block + place) * BLOCK + lane * LANE_CHANNELS, zeros, key)


@cute.kernel
def direct_down_kernel(key: Constexpr, args: MoeArguments):
    """One thread block: route y by the blocks of 128 hidden channels of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, route, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = allocate(smem, shared_bytes("down", key))
    s_row = allocate(smem, 2 * key.width)
    s_law = allocate(smem, 4 * LAW_WORDS)
    s_flags = allocate(smem, 4 * key.down.blocks)
    s_table = allocate(smem, table_bytes(key))
    allocate_padding(smem, "down", _needed_bytes(key), key)
    part = direct_scratch(args, key)
    expert = expert_of(args, route, key)
    live = live_routes(args, route // key.top_k, key)
    weight = load_value(args.weights, route, key.weight_dtype) * args.factor
    fill_table(args.g_table, s_table, thread, key.threads("down"), key)
    if thread < LAW_WORDS:
        gpu.store_shared_int(s_law + thread * 4, Int32(0))
    cute.arch.sync_threads()
    first_block = column * key.down.blocks
    if expert >= 0:
        place = Int64(expert) * (key.projections + 1) + key.projections
        linear = gpu.load_longs(args.descriptors + place * DESCRIPTOR_BYTES, 2)
        if warp == 0:
            fetch_output_scales(args, expert, first_block, lane, key)
        vectors = []
        for index in cutlass.range_constexpr(row_blocks(key)):
            block = cutlass.min(index * (key.threads("down") // 32) + warp, key.width // BLOCK - 1)
            vectors.append(load_vectors(args, expert, block, lane, key))

        def find_rows(_columns: int) -> Any:
            if key.overlaps:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            join_row(args, part.up_parts, vectors, expert, route, s_row, s_law, thread, key)
            return [s_row + lane_offset(lane, key)]

        s_mine = s_sums + warp * warp_bytes("down", key)
        strip = first_block * BLOCK_STRIPS + warp % key.strips("down")
        own, end = warp // key.strips("down"), Int32(key.width // STEP_CHANNELS)
        multiply_strip(args.words, linear, find_rows, s_mine, s_table, strip, Int32(1), own, end, lane, "down", key)
        cute.arch.sync_threads()
        _finish(
            args,
            part.arrivals,
            part.results,
            weight,
            live,
            s_sums,
            s_law,
            s_flags,
            expert,
            route,
            first_block,
            thread,
            key,
        )
    else:
        if cutlass.const_expr(key.overlaps):
            cute.arch.griddepcontrol_wait()
        if live == Uint32(0) and route % key.top_k == 0:
            _clear(args.out, route // key.top_k, first_block, thread, key)
