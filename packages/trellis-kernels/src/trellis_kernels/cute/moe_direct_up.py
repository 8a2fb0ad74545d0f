"""Owns the first launch of a direct layer: gate and up of one route by a cluster, and what lies between the GEMMs.

It must not know other routes.  A thread block finds its expert in the ids, starts its weights, and rotates its share of
the input into shared memory while they come.  The blocks of a cluster share the input channels of 128 output channels;
the first one adds their sums, in the order of the shares, from its own shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes
from trellis_kernels.cute.gemm_share import STEP_CHANNELS, STRIP_CHANNELS
from trellis_kernels.cute.moe_direct_rows import (
    LAW_WORDS,
    lane_offset,
    load_law,
    most_share_blocks,
    rotate_rows,
    share_blocks,
)
from trellis_kernels.cute.moe_gemm import (
    fill_table,
    load_block_sums,
    multiply_strip,
    shared_bytes,
    table_bytes,
    warp_bytes,
)
from trellis_kernels.cute.moe_key import HEADER_BYTES, MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_middle import join_block, load_vectors, store_block
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, Ids

__all__ = ["direct_up_bytes", "direct_up_kernel", "joined_row"]

_BLOCK_STRIPS = BLOCK // STRIP_CHANNELS
_STEPS = BLOCK // STEP_CHANNELS
_LINE_BYTES = 128
_TILE_WORD_BYTES = 16  # bytes of a tile for each half bit of its rate
_FETCH_BYTES = 1 << 12  # of the weights of down, by one instruction


def direct_up_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return (
        shared_bytes("up", key)
        + _row_bytes(key)
        + _part_bytes(key)
        + 4 * LAW_WORDS * key.rotated_inputs
        + table_bytes(key)
    )


def joined_row(scratch: Int64, route: Int32, key: MoeSmallKey) -> Int64:
    """Where the joined row of a route lies."""
    return scratch + Int64(HEADER_BYTES) + Int64(route) * (2 * key.width)


def _columns(key: MoeSmallKey) -> int:
    """Thread blocks of a route."""
    return key.width // BLOCK // key.up.blocks * key.up.split


def _row_bytes(key: MoeSmallKey) -> int:
    return key.rotated_inputs * most_share_blocks(key) * 2 * BLOCK


def _part_bytes(key: MoeSmallKey) -> int:
    """Everyone's sums, `[split, blocks, projections, 128] float32`."""
    return key.up.split * key.up.blocks * key.projections * BLOCK * 4


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _part_address(s_parts: Int32, rank: Any, place: Any, projection: Any, key: MoeSmallKey) -> Int32:
    return s_parts + ((rank * key.up.blocks + place) * key.projections + projection) * (4 * BLOCK)


@cute.jit
def _fetch_down(words: Int64, descriptors: Int64, expert: Int32, index: Int32, lane: Int32, key: Constexpr):
    """Bring this block's share of the expert's weights of down into the L2, which idles while codes are decoded."""
    linears = key.projections + 1
    place = gpu.load_longs(descriptors + (Int64(expert) * linears + key.projections) * DESCRIPTOR_BYTES, 2)
    nbytes = Int32(place[1]) * (key.width // 16 * (key.padded_hidden // 16) * _TILE_WORD_BYTES)
    share = (nbytes // _columns(key) + _FETCH_BYTES) // _FETCH_BYTES * _FETCH_BYTES
    first = index * share
    end = cutlass.min(first + share, nbytes)
    for at in cutlass.range(first + lane * _FETCH_BYTES, end, 32 * _FETCH_BYTES, unroll=1):
        size = cutlass.min(end - at, _FETCH_BYTES)
        gpu.fetch_range_to_l2(words + place[0] * 4 + Int64(at), size)


@cute.jit
def _give_sums(s_sums: Int32, s_parts: Int32, s_laws: Int32, rank: Int32, thread: Int32, key: Constexpr):
    """Hand this share's products to the cluster's first block."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    tasks = key.up.blocks * key.projections
    for task in cutlass.range(warp, tasks, key.threads("up") // 32, unroll=1):
        place = task // key.projections
        projection = task - place * key.projections
        strip = (place * key.projections + projection) * _BLOCK_STRIPS
        sums = load_block_sums(s_sums, Int32(0), lane, strip, "up", key)
        if cutlass.const_expr(key.is_bytes):
            which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)
            step, total = load_law(s_laws + which * (4 * LAW_WORDS))
            sums = moe_bytes.apply_step(sums, step, total)
        target = _part_address(s_parts, rank, place, projection, key) + lane * (4 * LANE_CHANNELS)
        if cutlass.const_expr(key.up.split > 1):
            gpu.store_cluster_floats(gpu.map_to_block(target, Int32(0)), sums)
        else:
            gpu.store_shared_floats(target, sums)


def _ordered_sums(s_parts: Int32, place: Int32, projection: int, lane: Int32, key: MoeSmallKey) -> list[Float32]:
    """Everyone's products of four channels, added in order."""
    total: list[Float32] = []
    for rank in range(key.up.split):
        part = _part_address(s_parts, rank, place, projection, key) + lane * (4 * LANE_CHANNELS)
        piece = gpu.load_shared_floats(part, LANE_CHANNELS)
        total = [a + b for a, b in zip(total, piece, strict=True)] if total else piece
    return total


@cute.jit
def _finish(
    scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    g_row: Int64,
    s_sums: Int32,
    s_parts: Int32,
    s_laws: Int32,
    expert: Int32,
    first_block: Int32,
    rank: Int32,
    thread: Int32,
    key: Constexpr,
):
    """From this block's sums in shared memory to the joined row."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    place = cutlass.min(warp, key.up.blocks - 1)
    vectors = load_vectors(scales, expert, first_block + place, lane, key)  # on their way before anyone is waited for
    if cutlass.const_expr(key.up.split > 1):
        cute.arch.cluster_wait()  # of the launch: every block of the cluster has begun
    _give_sums(s_sums, s_parts, s_laws, rank, thread, key)
    if cutlass.const_expr(key.up.split > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if rank == 0 and warp < key.up.blocks:
        sums = [_ordered_sums(s_parts, place, projection, lane, key) for projection in range(key.projections)]
        joined = join_block(sums, vectors, [gate_bias, up_bias], expert, first_block + place, lane, key)
        store_block(g_row, first_block + place, lane, joined)


@cute.kernel
def direct_up_kernel(
    x: Int64,
    ids: Int64,
    g_map: Int64,
    map_length: Int32,
    map_bytes: Int32,
    descriptors: Int64,
    words: Int64,
    g_table: Int64,
    input_scales: Int64,
    scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    scratch: Int64,
    key: Constexpr,
):
    """One thread block: route y by the blocks, and the share of the input channels, of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, route, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = smem.allocate_array(Float32, shared_bytes("up", key) // 4, byte_alignment=16).toint()
    s_rows = smem.allocate_array(Float32, _row_bytes(key) // 4, byte_alignment=16).toint()
    s_parts = smem.allocate_array(Float32, _part_bytes(key) // 4, byte_alignment=16).toint()
    s_laws = smem.allocate_array(Int32, LAW_WORDS * key.rotated_inputs, byte_alignment=16).toint()
    s_table = smem.allocate_array(Int32, table_bytes(key) // 4, byte_alignment=16).toint()
    if cutlass.const_expr(key.up.split > 1):
        cute.arch.cluster_arrive_relaxed()
    fill_table(g_table, s_table, thread, key.threads("up"), key)
    linears = key.projections + 1
    line = (route * _columns(key) + column) * _LINE_BYTES
    if thread == 0 and line < key.num_experts * linears * DESCRIPTOR_BYTES:
        gpu.fetch_to_l2(descriptors + Int64(line))
    if thread < LAW_WORDS * key.rotated_inputs:
        gpu.store_shared_int(s_laws + thread * 4, Int32(0))
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    expert = Ids(ids, g_map, map_length, map_bytes, key).load(route)
    cute.arch.griddepcontrol_launch_dependents()
    if expert >= 0:
        strips = key.strips("up")
        strip = warp % strips
        place = strip // (_BLOCK_STRIPS * key.projections)
        projection = strip // _BLOCK_STRIPS % key.projections
        linear = gpu.load_longs(descriptors + (Int64(expert) * linears + projection) * DESCRIPTOR_BYTES, 2)
        first_block = column // key.up.split * key.up.blocks
        rank = column % key.up.split
        share = share_blocks(key, rank)
        which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)
        if warp == key.threads("up") // 32 - 1:
            _fetch_down(words, descriptors, expert, column, lane, key)

        def find_rows(_columns: int) -> Any:
            rotate_rows(
                x, input_scales, route // key.top_k, expert, share[0], share[1], s_rows, s_laws, thread,
                key.threads("up"), key,
            )  # fmt: skip
            s_row = s_rows + (which * most_share_blocks(key) - share[0]) * (2 * BLOCK)
            return [s_row + lane_offset(lane, key)]

        multiply_strip(
            words,
            linear,
            find_rows,
            s_sums + warp * warp_bytes("up", key),
            (first_block + place) * _BLOCK_STRIPS + strip % _BLOCK_STRIPS,
            Int32(1),
            share[0] * _STEPS + warp // strips,
            share[1] * _STEPS,
            Int32(key.up.slices),
            lane,
            s_table,
            key.up_rates,
            key.width // 16,
            key.up,
            key,
        )
        cute.arch.sync_threads()
        _finish(
            scales, gate_bias, up_bias, joined_row(scratch, route, key), s_sums, s_parts, s_laws, expert, first_block,
            rank, thread, key,
        )  # fmt: skip
