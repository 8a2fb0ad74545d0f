"""Owns the second launch of a direct layer: down of one route by a thread block, and the sum over a token's routes.

It must not know other tokens.  A thread block starts its weights before the launch before it has ended, and waits only
then for the joined row.  The blocks of a token's routes for the same hidden channels are a cluster; each gives its
weighted row to the first one, which adds them in the order of the slots.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes, moe_math
from trellis_kernels.cute.gemm_share import STEP_CHANNELS, STRIP_CHANNELS
from trellis_kernels.cute.moe_direct_rows import LAW_WORDS, lane_offset, load_law, take_row
from trellis_kernels.cute.moe_direct_up import joined_row
from trellis_kernels.cute.moe_down import store_out
from trellis_kernels.cute.moe_gemm import (
    fill_table,
    load_block_sums,
    multiply_strip,
    shared_bytes,
    table_bytes,
    warp_bytes,
)
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, Ids, load_value

__all__ = ["direct_down_bytes", "direct_down_kernel"]

_BLOCK_STRIPS = BLOCK // STRIP_CHANNELS


def direct_down_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return shared_bytes("down", key) + 2 * key.width + _term_bytes(key) + 4 * LAW_WORDS + table_bytes(key)


def _term_bytes(key: MoeSmallKey) -> int:
    """Weighted rows of a token's routes, `[top k, blocks, 128] float32`."""
    return key.top_k * key.down.blocks * BLOCK * 4


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _weighted(
    sums: list[Float32],
    svh: list[Float32],
    bias: Int64,
    weight: Float32,
    expert: Int32,
    channel: Int32,
    lane: Int32,
    key: MoeSmallKey,
) -> list[Float32]:
    """From products in the rotated basis to the weighted row, for one block."""
    values = [a * b for a, b in zip(moe_math.hadamard(sums, moe_math.hadamard_signs(lane)), svh, strict=True)]
    if key.biased[2]:
        addend = moe_math.load_scales(bias, Int64(expert) * key.padded_hidden + Int64(channel))
        values = [a + b for a, b in zip(values, addend, strict=True)]
    return [value * weight for value in values]


@cute.jit
def _finish(
    scales: Int64,
    bias: Int64,
    weight: Float32,
    s_sums: Int32,
    s_law: Int32,
    s_term: Int32,
    expert: Int32,
    first_block: Int32,
    thread: Int32,
    key: Constexpr,
):
    """This route's weighted row, of whole blocks, to the cluster's first block."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    for place in cutlass.range(warp, key.down.blocks, key.threads("down") // 32, unroll=1):
        channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
        row = Int64(0) if cutlass.const_expr(key.shared_outputs) else Int64(expert) * key.padded_hidden
        svh = moe_math.load_scales(scales, row + Int64(channel))
        sums = load_block_sums(s_sums, Int32(0), lane, place * _BLOCK_STRIPS, "down", key)
        if cutlass.const_expr(key.is_bytes):
            step, total = load_law(s_law)
            sums = moe_bytes.apply_step(sums, step, total)
        values = _weighted(sums, svh, bias, weight, expert, channel, lane, key)
        _give(s_term, place, lane, values, key)


def _give(s_term: Int32, place: Int32, lane: Int32, values: list[Float32], key: MoeSmallKey) -> None:
    target = s_term + place * (4 * BLOCK) + lane * (4 * LANE_CHANNELS)
    if key.top_k > 1:
        gpu.store_cluster_floats(gpu.map_to_block(target, Int32(0)), values)
    else:
        gpu.store_shared_floats(target, values)


@cute.jit
def _sum_token(out: Int64, s_terms: Int32, token: Int32, first_block: Int32, thread: Int32, key: Constexpr):
    """A token's weighted rows in the order of its slots, in fp32."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    for place in cutlass.range(warp, key.down.blocks, key.threads("down") // 32, unroll=1):
        total = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
        for slot in cutlass.range_constexpr(key.top_k):
            s_row = s_terms + (slot * key.down.blocks + place) * (4 * BLOCK) + lane * (4 * LANE_CHANNELS)
            row = gpu.load_shared_floats(s_row, LANE_CHANNELS)
            total = [a + b for a, b in zip(total, row, strict=True)]
        store_out(out, token, (first_block + place) * BLOCK + lane * LANE_CHANNELS, total, key)


@cute.kernel
def direct_down_kernel(
    ids: Int64,
    weights: Int64,
    g_map: Int64,
    map_length: Int32,
    map_bytes: Int32,
    factor: Float32,
    descriptors: Int64,
    words: Int64,
    g_table: Int64,
    scales: Int64,
    bias: Int64,
    out: Int64,
    scratch: Int64,
    key: Constexpr,
):
    """One thread block: route y by the blocks of 128 hidden channels of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, route, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = smem.allocate_array(Float32, shared_bytes("down", key) // 4, byte_alignment=16).toint()
    s_row = smem.allocate_array(Float32, key.width // 2, byte_alignment=16).toint()
    s_terms = smem.allocate_array(Float32, _term_bytes(key) // 4, byte_alignment=16).toint()
    s_law = smem.allocate_array(Int32, LAW_WORDS, byte_alignment=16).toint()
    s_table = smem.allocate_array(Int32, table_bytes(key) // 4, byte_alignment=16).toint()
    if cutlass.const_expr(key.top_k > 1):
        cute.arch.cluster_arrive_relaxed()
    fill_table(g_table, s_table, thread, key.threads("down"), key)
    token = route // key.top_k
    slot = route - token * key.top_k
    expert = Ids(ids, g_map, map_length, map_bytes, key).load(route)
    weight = load_value(weights, route, key.weight_dtype) * factor
    cute.arch.griddepcontrol_launch_dependents()
    first_block = column * key.down.blocks
    s_term = s_terms + slot * (key.down.blocks * 4 * BLOCK)
    if thread < LAW_WORDS:
        gpu.store_shared_int(s_law + thread * 4, Int32(0))
    cute.arch.sync_threads()
    if expert >= 0:
        linears = key.projections + 1
        linear = gpu.load_longs(descriptors + (Int64(expert) * linears + key.projections) * DESCRIPTOR_BYTES, 2)
        strips = key.strips("down")
        if warp == 0:
            row = Int64(0) if cutlass.const_expr(key.shared_outputs) else Int64(expert) * key.padded_hidden
            moe_math.fetch_scales(scales, row + Int64(first_block * BLOCK), key.down.blocks * BLOCK, lane)

        def find_rows(_columns: int) -> Any:
            cute.arch.griddepcontrol_wait()
            take_row(joined_row(scratch, route, key), s_row, s_law, thread, key.threads("down"), key)
            return [s_row + lane_offset(lane, key)]

        multiply_strip(
            words,
            linear,
            find_rows,
            s_sums + warp * warp_bytes("down", key),
            first_block * _BLOCK_STRIPS + warp % strips,
            Int32(1),
            warp // strips,
            Int32(key.width // STEP_CHANNELS),
            Int32(key.down.slices),
            lane,
            s_table,
            key.down_rates,
            key.padded_hidden // 16,
            key.down,
            key,
        )
        cute.arch.sync_threads()
    else:
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(key.top_k > 1):
        cute.arch.cluster_wait()  # of the launch: every block of the cluster has begun
    if expert >= 0:
        _finish(scales, bias, weight, s_sums, s_law, s_term, expert, first_block, thread, key)
    else:
        for place in cutlass.range(warp, key.down.blocks, key.threads("down") // 32, unroll=1):
            _give(s_term, place, lane, [Float32(0.0)] * LANE_CHANNELS, key)
    if cutlass.const_expr(key.top_k > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if slot == 0:
        _sum_token(out, s_terms, token, first_block, thread, key)
