"""Owns the second launch of a few-token layer: gate and up, then all that lies between the GEMMs.

It must not know routing beyond groups.  A thread block multiplies the rows of one group by whole blocks of 128
intermediate channels of gate and up, so that the output rotation, the scales, the biases, the activation and the input
rotation of down happen where the sums are.  Where the input channels are split over thread blocks, the last one to
arrive adds everyone's sums in order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes, moe_math
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
from trellis_kernels.cute.moe_middle import join_block, load_vectors, store_block
from trellis_kernels.cute.moe_scratch import GROUP_BYTES, SLOT_BYTES, Scratch, load_place, scratch_at
from trellis_kernels.cute.moe_split import BLOCK_STRIPS, block_sums, leave_parts

__all__ = ["ready_count", "up_kernel", "up_shared_bytes"]


def up_shared_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return shared_bytes("up", key) + 16 + table_bytes(key)


def ready_count(key: MoeSmallKey) -> int:
    """What a group's ready counter holds once its rows are ready for down."""
    return key.width // BLOCK // key.up.blocks


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _input_entry(part: Scratch, slot: Int32, key: MoeSmallKey) -> Int64:
    """Index of the first rotated input of a slot's row."""
    route = gpu.load_ints(part.slots + Int64(slot) * SLOT_BYTES, 1)[0]
    return Int64(route // key.top_k if key.shared_inputs else route) * key.rotated_inputs


def _finish(
    args: MoeArguments,
    sums: list[list[Float32]],
    part: Scratch,
    expert: Int32,
    slot: Int32,
    block: Int32,
    lane: Int32,
    key: MoeSmallKey,
) -> None:
    """From sums in the rotated basis to the rotated fp16 input of down, for one block of one row."""
    vectors = load_vectors(args, expert, block, lane, key)
    branches = sums
    if key.is_bytes:
        first_law = part.rotated_laws + _input_entry(part, slot, key) * moe_bytes.LAW_BYTES
        branches = [
            moe_bytes.apply_law(values, first_law + (projection % key.rotated_inputs) * moe_bytes.LAW_BYTES)
            for projection, values in enumerate(sums)
        ]
    rotated = join_block(args, branches, vectors, expert, block, lane, key)
    store_block(part.joined + Int64(slot) * (2 * key.width), block, lane, rotated)


@cute.jit
def _finish_rows(
    args: MoeArguments,
    s_sums: Int32,
    expert: Int32,
    first_slot: Int32,
    rows: Int32,
    first_block: Int32,
    rank: Int32,
    group: Int32,
    s_last: Int32,
    thread: Int32,
    key: Constexpr,
):
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = key.threads("up") // 32
    part = scratch_at(args, key)
    is_last = Int32(1)
    if cutlass.const_expr(key.up.split > 1):
        is_last = leave_parts(
            part.up_parts,
            part.up_arrivals,
            s_sums,
            s_last,
            first_slot,
            rows,
            first_block,
            rank,
            group,
            thread,
            "up",
            key,
        )
    if is_last == 1:
        for task in cutlass.range(warp, rows * key.up.blocks, warps, unroll=1):
            row = task // key.up.blocks
            place = task - row * key.up.blocks
            block = first_block + place
            channel = block * BLOCK + lane * LANE_CHANNELS
            slot = first_slot + row
            sums = [
                block_sums(part.up_parts, s_sums, slot, row, place, projection, channel, lane, "up", key)
                for projection in range(key.projections)
            ]
            _finish(args, sums, part, expert, slot, block, lane, key)
        cute.arch.sync_threads()
        ready = part.group_ready + Int64(group) * 4
        if cutlass.const_expr(key.is_bytes):
            if thread == 0:
                gpu.store_shared_int(s_last, gpu.add_counter(part.group_arrivals + Int64(group) * 4, Int32(1)))
            cute.arch.sync_threads()
            if gpu.load_shared_int(s_last) == ready_count(key) - 1:
                for row in cutlass.range(warp, rows, warps, unroll=1):
                    entry = Int64(first_slot + row)
                    moe_bytes.quantise_row(
                        part.joined + entry * (2 * key.width),
                        part.joined_bytes + entry * (2 * key.width),
                        part.joined_laws + entry * moe_bytes.LAW_BYTES,
                        key.width,
                        lane,
                    )
                cute.arch.sync_threads()
                if thread == 0:
                    gpu.add_counter(ready, Int32(ready_count(key)))
        else:
            if thread == 0:
                gpu.add_counter(ready, Int32(1))


@cute.kernel
def up_kernel(key: Constexpr, args: MoeArguments):
    """One thread block: the rows of group y by the blocks, and the share of the input channels, of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, group, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = allocate(smem, shared_bytes("up", key))
    s_last = allocate(smem, 16)
    s_table = allocate(smem, table_bytes(key))
    fill_table(args.g_table, s_table, thread, key.threads("up"), key)
    part = scratch_at(args, key)
    strip = warp % key.strips("up")
    place = strip // (BLOCK_STRIPS * key.projections)
    projection = strip // BLOCK_STRIPS % key.projections
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_wait()
    entry = gpu.load_fresh_ints(part.groups + Int64(group) * GROUP_BYTES, 4)
    linear = load_place(part, group, projection)
    groups = gpu.load_fresh_ints(part.header, 1)[0]
    is_live = group < groups
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_launch_dependents()
    if is_live:
        expert = entry[0]
        first_slot = entry[1]
        rows = entry[2]
        first_block = column // key.up.split * key.up.blocks
        rank = column % key.up.split
        steps = split_steps(key.padded_hidden, key.up.split, rank)
        which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)
        if warp == 0:
            row = Int64(expert) * (key.projections + 1)
            for index in cutlass.range_constexpr(key.projections + 1):
                first = (row + index) * key.width + Int64(first_block * BLOCK)
                moe_math.fetch_scales(args.middle_scales, first, key.up.blocks * BLOCK, lane)

        def address(row: Int32) -> Int64:
            return part.rotated + (_input_entry(part, first_slot + row, key) + Int64(which)) * (2 * key.padded_hidden)

        def find_rows(columns: int) -> Any:
            return lane_rows(rows, lane, columns, key, address)

        s_mine = s_sums + warp * warp_bytes("up", key)
        target = (first_block + place) * BLOCK_STRIPS + strip % BLOCK_STRIPS
        own = steps[0] + warp // key.strips("up")
        multiply_strip(args.words, linear, find_rows, s_mine, s_table, target, rows, own, steps[1], lane, "up", key)
        cute.arch.sync_threads()
        _finish_rows(args, s_sums, expert, first_slot, rows, first_block, rank, group, s_last, thread, key)
