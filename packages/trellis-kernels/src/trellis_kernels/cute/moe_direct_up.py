"""Owns the first launch of a direct layer: the products of gate and up of one route.

It must not know other routes.  A thread block finds its expert in the ids, starts its weights, and rotates its share of
the input into shared memory while they come.  What lies between the GEMMs needs everyone's sums, which the next launch
adds where it needs them; so nobody waits for anybody here.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import primitives
from trellis_kernels.cute.gemm_share import STEP_CHANNELS
from trellis_kernels.cute.moe_arguments import MoeArguments, expert_of
from trellis_kernels.cute.moe_direct_rows import (
    LAW_WORDS,
    block_products,
    lane_offset,
    most_share_blocks,
    rotate_rows,
    share_blocks,
)
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
from trellis_kernels.cute.moe_key import MoeSmallKey, direct_counters
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, direct_scratch
from trellis_kernels.cute.moe_split import BLOCK_STRIPS, part_address

__all__ = ["direct_up_bytes", "direct_up_kernel"]

_STEPS = BLOCK // STEP_CHANNELS
_MOST_COPIED = 1024  # descriptors that a thread block copies before it knows which one it needs


def direct_up_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return padded_bytes("up", _needed_bytes(key), key)


def _needed_bytes(key: MoeSmallKey) -> int:
    laws = 4 * LAW_WORDS * key.rotated_inputs
    return shared_bytes("up", key) + _row_bytes(key) + laws + table_bytes(key) + _descriptor_bytes(key)


def _row_bytes(key: MoeSmallKey) -> int:
    return key.rotated_inputs * most_share_blocks(key) * 2 * BLOCK


def _descriptors(key: MoeSmallKey) -> int:
    return key.max_experts * (key.projections + 1)


def _descriptor_bytes(key: MoeSmallKey) -> int:
    return DESCRIPTOR_BYTES * (_descriptors(key) if _descriptors(key) <= _MOST_COPIED else 1)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


@cute.jit
def _copy_descriptors(args: MoeArguments, s_descriptors: Int32, thread: Int32, key: Constexpr):
    """All of them, before it is known which are needed: what the launch before wrote is not waited for."""
    if cutlass.const_expr(_descriptors(key) <= _MOST_COPIED):
        for index in cutlass.range(thread, args.experts * (key.projections + 1), key.threads("up"), unroll=1):
            at = index * DESCRIPTOR_BYTES
            primitives.copy_to_shared(s_descriptors + at, args.descriptors + Int64(at))


def _load_place(args: MoeArguments, s_descriptors: Int32, expert: Int32, linear: Any, key: MoeSmallKey) -> list[Int64]:
    """First word and 2K of a linear."""
    index = expert * (key.projections + 1) + linear
    if _descriptors(key) > _MOST_COPIED:
        return gpu.load_longs(args.descriptors + Int64(index) * DESCRIPTOR_BYTES, 2)
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
        which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)
        sums = block_products(s_sums, s_laws + which * (4 * LAW_WORDS), lane, task * BLOCK_STRIPS, "up", key)
        channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
        gpu.store_floats(part_address(g_parts, route, rank, projection, channel, "up", key), sums)


@cute.kernel
def direct_up_kernel(key: Constexpr, args: MoeArguments):
    """One thread block: route y by the blocks, and the share of the input channels, of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, route, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = allocate(smem, shared_bytes("up", key))
    s_rows = allocate(smem, _row_bytes(key))
    s_laws = allocate(smem, 4 * LAW_WORDS * key.rotated_inputs)
    s_table = allocate(smem, table_bytes(key))
    s_descriptors = allocate(smem, _descriptor_bytes(key))
    allocate_padding(smem, "up", _needed_bytes(key), key)
    part = direct_scratch(args, key)
    _copy_descriptors(args, s_descriptors, thread, key)
    fill_table(args.g_table, s_table, thread, key.threads("up"), key)
    if thread < LAW_WORDS * key.rotated_inputs:
        gpu.store_shared_int(s_laws + thread * 4, Int32(0))
    cute.arch.sync_threads()
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_wait()
    expert = expert_of(args, route, key)
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_launch_dependents()
    columns = key.columns("up")
    blocks = args.tokens * (key.top_k * columns)
    first = (route * columns + column) * key.threads("up") + thread
    for index in cutlass.range(first, args.tokens * direct_counters(key), blocks * key.threads("up"), unroll=1):
        gpu.store_words(part.arrivals + Int64(index) * 4, [Uint32(0)])
    if expert >= 0:
        strip = warp % key.strips("up")
        place = strip // (BLOCK_STRIPS * key.projections)
        projection = strip // BLOCK_STRIPS % key.projections
        linear = _load_place(args, s_descriptors, expert, projection, key)
        first_block = column // key.up.split * key.up.blocks
        rank = column % key.up.split
        share = share_blocks(key, rank)
        which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)

        def find_rows(_columns: int) -> Any:
            rotate_rows(args, route // key.top_k, expert, share[0], share[1], s_rows, s_laws, thread, key)
            s_row = s_rows + (which * most_share_blocks(key) - share[0]) * (2 * BLOCK)
            return [s_row + lane_offset(lane, key)]

        s_mine = s_sums + warp * warp_bytes("up", key)
        target = (first_block + place) * BLOCK_STRIPS + strip % BLOCK_STRIPS
        own = share[0] * _STEPS + warp // key.strips("up")
        end = share[1] * _STEPS
        multiply_strip(args.words, linear, find_rows, s_mine, s_table, target, Int32(1), own, end, lane, "up", key)
        cute.arch.sync_threads()
        _store_parts(part.up_parts, s_sums, s_laws, route, rank, first_block, thread, key)
