"""Owns the third launch of a few-token layer: down, its output rotation, the router weight and the sum over routes.

It must not know routing beyond groups and slots.  The launch begins as soon as every block of `moe_up` has begun, in
whatever room they leave, and waits for nothing but the rows of its own group; so both launches share the device while
`moe_up` drains.  Its first weights are under way before it waits.

A thread block multiplies the rows of one group by whole blocks of 128 hidden channels and writes each weighted row.
The one whose row completes a token's block adds that token's rows in the order of its slots, so the sum has one order
whatever the timing.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes
from trellis_kernels.cute.moe_arguments import MoeArguments
from trellis_kernels.cute.moe_gemm import (
    allocate,
    fill_table,
    lane_rows,
    multiply_strip,
    shared_bytes,
    split_steps,
    table_bytes,
    warp_bytes,
)
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_result import arrive, fetch_output_scales, load_output_scales, store_weighted, sum_token
from trellis_kernels.cute.moe_scratch import GROUP_BYTES, SLOT_BYTES, load_place, scratch_at
from trellis_kernels.cute.moe_split import BLOCK_STRIPS, block_sums, leave_parts
from trellis_kernels.cute.moe_up import ready_count

__all__ = ["down_kernel", "down_shared_bytes"]


def down_shared_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return shared_bytes("down", key) + 4 * key.group_rows * key.down.blocks + 16 + table_bytes(key)


@cute.jit
def _finish_rows(
    args: MoeArguments,
    s_sums: Int32,
    s_flags: Int32,
    expert: Int32,
    first_slot: Int32,
    rows: Int32,
    first_block: Int32,
    rank: Int32,
    group: Int32,
    thread: Int32,
    key: Constexpr,
):
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = key.threads("down") // 32
    part = scratch_at(args, key)
    tasks = rows * key.down.blocks
    is_last = Int32(1)
    if cutlass.const_expr(key.down.split > 1):
        is_last = leave_parts(
            part.down_parts,
            part.down_arrivals,
            s_sums,
            s_flags,
            first_slot,
            rows,
            first_block,
            rank,
            group,
            thread,
            "down",
            key,
        )
        cute.arch.sync_threads()
    if is_last == 1:
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            row = task // key.down.blocks
            place = task - row * key.down.blocks
            channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
            slot = first_slot + row
            sums = block_sums(part.down_parts, s_sums, slot, row, place, 0, channel, lane, "down", key)
            if cutlass.const_expr(key.is_bytes):
                sums = moe_bytes.apply_law(sums, part.joined_laws + Int64(slot) * moe_bytes.LAW_BYTES)
            record = gpu.load_words(part.slots + Int64(slot) * SLOT_BYTES, 4)
            svh = load_output_scales(args, expert, channel, key)
            weight = gpu.float_from(record[2], "float32", 0)
            store_weighted(args, part.results, sums, svh, weight, expert, Int32(record[0]), channel, lane, key)
        cute.arch.sync_threads()
        for task in cutlass.range(thread, tasks, key.threads("down"), unroll=1):
            row = task // key.down.blocks
            place = task - row * key.down.blocks
            record = gpu.load_words(part.slots + Int64(first_slot + row) * SLOT_BYTES, 2)
            token = Int32(record[0]) // key.top_k
            arrive(part.token_arrivals, token, first_block + place, record[1], s_flags + task * 4, key)
        cute.arch.sync_threads()
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            if gpu.load_shared_int(s_flags + task * 4) == 1:
                row = task // key.down.blocks
                place = task - row * key.down.blocks
                channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
                record = gpu.load_words(part.slots + Int64(first_slot + row) * SLOT_BYTES, 2)
                sum_token(args.out, part.results, Int32(record[0]) // key.top_k, record[1], channel, key)


@cute.kernel
def down_kernel(key: Constexpr, args: MoeArguments):
    """One thread block: the rows of group y by the blocks, and the share of the input channels, of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, group, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = allocate(smem, shared_bytes("down", key))
    s_flags = allocate(smem, 4 * key.group_rows * key.down.blocks)
    s_table = allocate(smem, table_bytes(key))
    fill_table(args.g_table, s_table, thread, key.threads("down"), key)
    part = scratch_at(args, key)
    entry = gpu.load_fresh_ints(part.groups + Int64(group) * GROUP_BYTES, 4)
    linear = load_place(part, group, key.projections)
    groups = gpu.load_fresh_ints(part.header, 1)[0]
    if group < groups:
        expert = entry[0]
        first_slot = entry[1]
        rows = entry[2]
        first_block = column // key.down.split * key.down.blocks
        rank = column % key.down.split
        steps = split_steps(key.width, key.down.split, rank)
        if warp == 0:
            fetch_output_scales(args, expert, first_block, lane, key)

        def address(row: Int32) -> Int64:
            rows_at = part.joined_bytes if key.is_bytes else part.joined
            return rows_at + Int64(first_slot + row) * (2 * key.width)

        def find_rows(columns: int) -> Any:
            gpu.wait_for_counter(part.group_ready + Int64(group) * 4, ready_count(key))
            return lane_rows(rows, lane, columns, key, address)

        s_mine = s_sums + warp * warp_bytes("down", key)
        strip = first_block * BLOCK_STRIPS + warp % key.strips("down")
        own = steps[0] + warp // key.strips("down")
        multiply_strip(args.words, linear, find_rows, s_mine, s_table, strip, rows, own, steps[1], lane, "down", key)
        cute.arch.sync_threads()
        _finish_rows(args, s_sums, s_flags, expert, first_slot, rows, first_block, rank, group, thread, key)
