"""Owns the first launch of a direct layer: the products of gate and up of one route.

It must not know other routes.  A thread block finds its expert in the ids, starts its weights, and rotates its share of
the input into shared memory while they come.  What lies between the GEMMs needs everyone's sums, which the next launch
adds where it needs them; so nobody waits for anybody here.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes, primitives
from trellis_kernels.cute.gemm_share import STEP_CHANNELS, STRIP_CHANNELS
from trellis_kernels.cute.moe_direct_rows import (
    LAW_WORDS,
    lane_offset,
    load_law,
    most_share_blocks,
    part_address,
    rotate_rows,
    share_blocks,
)
from trellis_kernels.cute.moe_gemm import (
    fill_table,
    load_block_sums,
    multiply_strip,
    padded_bytes,
    shared_bytes,
    table_bytes,
    warp_bytes,
)
from trellis_kernels.cute.moe_key import MoeSmallKey, direct_counters
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, Ids, direct_scratch

__all__ = ["direct_up_bytes", "direct_up_kernel"]

_BLOCK_STRIPS = BLOCK // STRIP_CHANNELS
_STEPS = BLOCK // STEP_CHANNELS
_MOST_COPIED = 1024  # descriptors that a thread block copies before it knows which one it needs


def direct_up_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return padded_bytes("up", _needed_bytes(key), key)


def _needed_bytes(key: MoeSmallKey) -> int:
    laws = 4 * LAW_WORDS * key.rotated_inputs
    return shared_bytes("up", key) + _row_bytes(key) + laws + table_bytes(key) + _descriptor_bytes(key)


def _columns(key: MoeSmallKey) -> int:
    """Thread blocks of a route."""
    return key.width // BLOCK // key.up.blocks * key.up.split


def _row_bytes(key: MoeSmallKey) -> int:
    return key.rotated_inputs * most_share_blocks(key) * 2 * BLOCK


def _descriptors(key: MoeSmallKey) -> int:
    return key.max_experts * (key.projections + 1)


def _descriptor_bytes(key: MoeSmallKey) -> int:
    return DESCRIPTOR_BYTES * (_descriptors(key) if _descriptors(key) <= _MOST_COPIED else 1)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


@cute.jit
def _copy_descriptors(descriptors: Int64, s_descriptors: Int32, experts: Int32, thread: Int32, key: Constexpr):
    """All of them, before it is known which are needed: what the launch before wrote is not waited for."""
    if cutlass.const_expr(_descriptors(key) <= _MOST_COPIED):
        for index in cutlass.range(thread, experts * (key.projections + 1), key.threads("up"), unroll=1):
            at = index * DESCRIPTOR_BYTES
            primitives.copy_to_shared(s_descriptors + at, descriptors + Int64(at))


def _load_place(descriptors: Int64, s_descriptors: Int32, expert: Int32, linear: Any, key: MoeSmallKey) -> list[Int64]:
    """First word and 2K of a linear."""
    index = expert * (key.projections + 1) + linear
    if _descriptors(key) > _MOST_COPIED:
        return gpu.load_longs(descriptors + Int64(index) * DESCRIPTOR_BYTES, 2)
    words = primitives.load_shared(s_descriptors + index * DESCRIPTOR_BYTES, 4)
    return [Int64(words[0]) + (Int64(words[1]) << 32), Int64(words[2])]


@cute.jit
def _store_parts(
    g_parts: Int64,
    s_sums: Int32,
    s_laws: Int32,
    route: Int32,
    rank: Int32,
    first_block: Int32,
    thread: Int32,
    key: Constexpr,
):
    """This share's products, for the next launch."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    for task in cutlass.range(warp, key.up.blocks * key.projections, key.threads("up") // 32, unroll=1):
        place = task // key.projections
        projection = task - place * key.projections
        sums = load_block_sums(s_sums, Int32(0), lane, task * _BLOCK_STRIPS, "up", key)
        if cutlass.const_expr(key.is_bytes):
            which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)
            step, total = load_law(s_laws + which * (4 * LAW_WORDS))
            sums = moe_bytes.apply_step(sums, step, total)
        channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
        gpu.store_floats(part_address(g_parts, route, rank, projection, channel, key), sums)


@cute.kernel
def direct_up_kernel(
    x: Int64,
    ids: Int64,
    g_map: Int64,
    map_length: Int32,
    map_bytes: Int32,
    experts: Int32,
    descriptors: Int64,
    words: Int64,
    g_table: Int64,
    input_scales: Int64,
    scratch: Int64,
    tokens: Int32,
    max_tokens: Int32,
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
    s_laws = smem.allocate_array(Int32, LAW_WORDS * key.rotated_inputs, byte_alignment=16).toint()
    s_table = smem.allocate_array(Int32, table_bytes(key) // 4, byte_alignment=16).toint()
    s_descriptors = smem.allocate_array(Int32, _descriptor_bytes(key) // 4, byte_alignment=16).toint()
    if cutlass.const_expr(direct_up_bytes(key) > _needed_bytes(key)):
        smem.allocate_array(Int32, (direct_up_bytes(key) - _needed_bytes(key)) // 4, byte_alignment=16)
    part = direct_scratch(scratch, max_tokens, key)
    _copy_descriptors(descriptors, s_descriptors, experts, thread, key)
    fill_table(g_table, s_table, thread, key.threads("up"), key)
    if thread < LAW_WORDS * key.rotated_inputs:
        gpu.store_shared_int(s_laws + thread * 4, Int32(0))
    cute.arch.sync_threads()
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_wait()
    expert = Ids(ids, g_map, map_length, map_bytes, experts, key).load(route)
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_launch_dependents()
    blocks = tokens * (key.top_k * _columns(key))
    first = (route * _columns(key) + column) * key.threads("up") + thread
    for index in cutlass.range(first, tokens * direct_counters(key), blocks * key.threads("up"), unroll=1):
        gpu.store_words(part.arrivals + Int64(index) * 4, [Uint32(0)])
    if expert >= 0:
        strips = key.strips("up")
        strip = warp % strips
        place = strip // (_BLOCK_STRIPS * key.projections)
        projection = strip // _BLOCK_STRIPS % key.projections
        linear = _load_place(descriptors, s_descriptors, expert, projection, key)
        first_block = column // key.up.split * key.up.blocks
        rank = column % key.up.split
        share = share_blocks(key, rank)
        which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)

        def find_rows(_columns: int) -> Any:
            rotate_rows(x, input_scales, route // key.top_k, expert, share[0], share[1], s_rows, s_laws, thread, key)
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
        _store_parts(part.up_parts, s_sums, s_laws, route, rank, first_block, thread, key)
