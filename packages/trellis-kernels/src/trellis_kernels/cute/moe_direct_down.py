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
from trellis_kernels.cute import moe_bytes, moe_math
from trellis_kernels.cute.gemm_share import STEP_CHANNELS, STRIP_CHANNELS
from trellis_kernels.cute.moe_direct_rows import LAW_WORDS, join_row, lane_offset, load_law, row_blocks
from trellis_kernels.cute.moe_down import store_out, sum_token
from trellis_kernels.cute.moe_gemm import (
    fill_table,
    load_block_sums,
    multiply_strip,
    padded_bytes,
    shared_bytes,
    table_bytes,
    warp_bytes,
)
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_middle import load_vectors
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, Ids, direct_scratch, load_value

__all__ = ["direct_down_bytes", "direct_down_kernel"]

_BLOCK_STRIPS = BLOCK // STRIP_CHANNELS


def direct_down_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return padded_bytes("down", _needed_bytes(key), key)


def _needed_bytes(key: MoeSmallKey) -> int:
    return shared_bytes("down", key) + 2 * key.width + 4 * LAW_WORDS + 4 * key.down.blocks + 16 + table_bytes(key)


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
    out: Int64,
    weight: Float32,
    live: Uint32,
    arrivals: Int64,
    results: Int64,
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
        row = Int64(0) if cutlass.const_expr(key.shared_outputs) else Int64(expert) * key.padded_hidden
        svh = moe_math.load_scales(scales, row + Int64(channel))
        sums = load_block_sums(s_sums, Int32(0), lane, place * _BLOCK_STRIPS, "down", key)
        if cutlass.const_expr(key.is_bytes):
            step, total = load_law(s_law)
            sums = moe_bytes.apply_step(sums, step, total)
        values = _weighted(sums, svh, bias, weight, expert, channel, lane, key)
        gpu.store_floats(results + (Int64(route) * key.padded_hidden + Int64(channel)) * 4, values)
    cute.arch.sync_threads()
    if thread < key.down.blocks:
        counter = arrivals + Int64(token * (key.padded_hidden // BLOCK) + first_block + thread) * 4
        is_complete = Int32(gpu.add_counter(counter, Int32(1)) == gpu.count_bits(live) - 1)
        gpu.store_shared_int(s_flags + thread * 4, is_complete)
    cute.arch.sync_threads()
    for place in cutlass.range(warp, key.down.blocks, warps, unroll=1):
        if gpu.load_shared_int(s_flags + place * 4) == 1:
            sum_token(out, results, token, live, (first_block + place) * BLOCK + lane * LANE_CHANNELS, key)


@cute.jit
def _clear(out: Int64, token: Int32, first_block: Int32, thread: Int32, key: Constexpr):
    """Zeros for a token that no expert serves."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    for place in cutlass.range(warp, key.down.blocks, key.threads("down") // 32, unroll=1):
        zeros = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
        store_out(out, token, (first_block + place) * BLOCK + lane * LANE_CHANNELS, zeros, key)


@cute.kernel
def direct_down_kernel(
    ids: Int64,
    weights: Int64,
    g_map: Int64,
    map_length: Int32,
    map_bytes: Int32,
    experts: Int32,
    factor: Float32,
    descriptors: Int64,
    words: Int64,
    g_table: Int64,
    middle_scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    scales: Int64,
    bias: Int64,
    out: Int64,
    scratch: Int64,
    max_tokens: Int32,
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
    s_law = smem.allocate_array(Int32, LAW_WORDS, byte_alignment=16).toint()
    s_flags = smem.allocate_array(Int32, key.down.blocks, byte_alignment=16).toint()
    s_table = smem.allocate_array(Int32, table_bytes(key) // 4, byte_alignment=16).toint()
    if cutlass.const_expr(direct_down_bytes(key) > _needed_bytes(key)):
        smem.allocate_array(Int32, (direct_down_bytes(key) - _needed_bytes(key)) // 4, byte_alignment=16)
    part = direct_scratch(scratch, max_tokens, key)
    routing = Ids(ids, g_map, map_length, map_bytes, experts, key)
    expert = routing.load(route)
    live = routing.live(route // key.top_k)
    weight = load_value(weights, route, key.weight_dtype) * factor
    fill_table(g_table, s_table, thread, key.threads("down"), key)
    if thread < LAW_WORDS:
        gpu.store_shared_int(s_law + thread * 4, Int32(0))
    cute.arch.sync_threads()
    first_block = column * key.down.blocks
    if expert >= 0:
        linear = gpu.load_longs(
            descriptors + (Int64(expert) * (key.projections + 1) + key.projections) * DESCRIPTOR_BYTES, 2
        )
        strips = key.strips("down")
        if warp == 0:
            row = Int64(0) if cutlass.const_expr(key.shared_outputs) else Int64(expert) * key.padded_hidden
            moe_math.fetch_scales(scales, row + Int64(first_block * BLOCK), key.down.blocks * BLOCK, lane)
        vectors = []
        for index in cutlass.range_constexpr(row_blocks(key)):
            block = cutlass.min(index * (key.threads("down") // 32) + warp, key.width // BLOCK - 1)
            vectors.append(load_vectors(middle_scales, expert, block, lane, key))

        def find_rows(_columns: int) -> Any:
            if key.overlaps:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            join_row(part.up_parts, vectors, [gate_bias, up_bias], expert, route, s_row, s_law, thread, key)
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
        _finish(
            scales, bias, out, weight, live, part.arrivals, part.results, s_sums, s_law, s_flags, expert, route,
            first_block, thread, key,
        )  # fmt: skip
    else:
        if cutlass.const_expr(key.overlaps):
            cute.arch.griddepcontrol_wait()
        if live == Uint32(0) and route % key.top_k == 0:
            _clear(out, route // key.top_k, first_block, thread, key)
