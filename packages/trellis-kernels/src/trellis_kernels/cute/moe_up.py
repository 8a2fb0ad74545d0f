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
from trellis_kernels.cute.gemm_share import STRIP_CHANNELS
from trellis_kernels.cute.moe_gemm import (
    fill_table,
    lane_rows,
    load_block_sums,
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

__all__ = ["ready_count", "up_kernel", "up_shared_bytes"]

_BLOCK_STRIPS = BLOCK // STRIP_CHANNELS


def up_shared_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return shared_bytes("up", key) + 16 + table_bytes(key)


def ready_count(key: MoeSmallKey) -> int:
    """What a group's ready counter holds once its rows are ready for down."""
    return key.width // BLOCK // key.up.blocks


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _part_address(part: Scratch, slot: Int32, index: Any, projection: int, channel: Int32, key: MoeSmallKey) -> Int64:
    row = (Int64(slot) * key.up.split + Int64(index)) * key.projections + projection
    return part.up_parts + (row * key.width + Int64(channel)) * 4


def _input_entry(part: Scratch, slot: Int32, key: MoeSmallKey) -> Int64:
    """Index of the first rotated input of a slot's row."""
    route = gpu.load_ints(part.slots + Int64(slot) * SLOT_BYTES, 1)[0]
    return Int64(route // key.top_k if key.shared_inputs else route) * key.rotated_inputs


def _finish(
    sums: list[list[Float32]],
    scales: Int64,
    biases: list[Int64],
    part: Scratch,
    expert: Int32,
    slot: Int32,
    block: Int32,
    lane: Int32,
    key: MoeSmallKey,
) -> None:
    """From sums in the rotated basis to the rotated fp16 input of down, for one block of one row."""
    vectors = load_vectors(scales, expert, block, lane, key)
    branches = sums
    if key.is_bytes:
        first_law = part.rotated_laws + _input_entry(part, slot, key) * moe_bytes.LAW_BYTES
        branches = [
            moe_bytes.apply_law(values, first_law + (projection % key.rotated_inputs) * moe_bytes.LAW_BYTES)
            for projection, values in enumerate(sums)
        ]
    rotated = join_block(branches, vectors, biases, expert, block, lane, key)
    store_block(part.joined + Int64(slot) * (2 * key.width), block, lane, rotated)


@cute.jit
def _finish_rows(
    scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    scratch: Int64,
    max_tokens: Int32,
    s_sums: Int32,
    expert: Int32,
    first_slot: Int32,
    rows: Int32,
    first_block: Int32,
    split_index: Int32,
    group: Int32,
    s_last: Int32,
    thread: Int32,
    key: Constexpr,
):
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = key.threads("up") // 32
    part = scratch_at(scratch, max_tokens, key)
    tasks = rows * key.up.blocks
    per_block = _BLOCK_STRIPS * key.projections
    is_last = Int32(1)
    if cutlass.const_expr(key.up.split > 1):
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            row = task // key.up.blocks
            place = task - row * key.up.blocks
            channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
            for projection in cutlass.range_constexpr(key.projections):
                strip = place * per_block + projection * _BLOCK_STRIPS
                sums = load_block_sums(s_sums, row, lane, strip, "up", key)
                gpu.store_floats(_part_address(part, first_slot + row, split_index, projection, channel, key), sums)
        cute.arch.sync_threads()
        if thread == 0:
            counter = part.up_arrivals + Int64(group * (key.width // BLOCK) + first_block) * 4
            gpu.store_shared_int(s_last, gpu.add_counter(counter, Int32(1)))
        cute.arch.sync_threads()
        is_last = Int32(gpu.load_shared_int(s_last) == key.up.split - 1)
    if is_last == 1:
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            row = task // key.up.blocks
            place = task - row * key.up.blocks
            channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
            branches = []
            for projection in cutlass.range_constexpr(key.projections):
                if cutlass.const_expr(key.up.split > 1):
                    sums = _ordered_parts(part, first_slot + row, projection, channel, key)
                else:
                    strip = place * per_block + projection * _BLOCK_STRIPS
                    sums = load_block_sums(s_sums, row, lane, strip, "up", key)
                branches.append(sums)
            _finish(
                branches, scales, [gate_bias, up_bias], part, expert, first_slot + row, first_block + place, lane, key
            )
        cute.arch.sync_threads()
        ready = part.group_ready + Int64(group) * 4
        if cutlass.const_expr(key.is_bytes):
            if thread == 0:
                gpu.store_shared_int(s_last, gpu.add_counter(part.group_arrivals + Int64(group) * 4, Int32(1)))
            cute.arch.sync_threads()
            if gpu.load_shared_int(s_last) == key.width // BLOCK // key.up.blocks - 1:
                for row in cutlass.range(warp, rows, warps, unroll=1):
                    slot = Int64(first_slot + row)
                    moe_bytes.quantise_row(
                        part.joined + slot * (2 * key.width),
                        part.joined_bytes + slot * (2 * key.width),
                        part.joined_laws + slot * moe_bytes.LAW_BYTES,
                        key.width,
                        lane,
                    )
                cute.arch.sync_threads()
                if thread == 0:
                    gpu.add_counter(ready, Int32(ready_count(key)))
        else:
            if thread == 0:
                gpu.add_counter(ready, Int32(1))


def _ordered_parts(part: Scratch, slot: Int32, projection: int, channel: Int32, key: MoeSmallKey) -> list[Float32]:
    """Everyone's sums of four channels, added in order."""
    pieces = [
        gpu.load_floats(_part_address(part, slot, index, projection, channel, key), 4, bypass_l1=True)
        for index in range(key.up.split)
    ]
    total = pieces[0]
    for piece in pieces[1:]:
        total = [a + b for a, b in zip(total, piece, strict=True)]
    return total


@cute.kernel
def up_kernel(
    words: Int64,
    g_table: Int64,
    scales: Int64,
    gate_bias: Int64,
    up_bias: Int64,
    scratch: Int64,
    max_tokens: Int32,
    key: Constexpr,
):
    """One thread block: the rows of group y by the blocks, and the share of the input channels, of column x."""
    thread, _, _ = cute.arch.thread_idx()
    column, group, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    smem = cutlass.memory.SmemAllocator()
    s_sums = smem.allocate_array(Float32, shared_bytes("up", key) // 4, byte_alignment=16).toint()
    s_last = smem.allocate_array(Int32, 4, byte_alignment=16).toint()
    s_table = smem.allocate_array(Int32, table_bytes(key) // 4, byte_alignment=16).toint()
    fill_table(g_table, s_table, thread, key.threads("up"), key)
    part = scratch_at(scratch, max_tokens, key)
    strips = key.strips("up")
    strip = warp % strips
    place = strip // (_BLOCK_STRIPS * key.projections)
    projection = strip // _BLOCK_STRIPS % key.projections
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
        split_index = column % key.up.split
        steps = split_steps(key.padded_hidden, key.up.split, split_index)
        which = projection if cutlass.const_expr(key.rotated_inputs == 2) else Int32(0)
        if warp == 0:
            row = Int64(expert) * (key.projections + 1)
            for index in cutlass.range_constexpr(key.projections + 1):
                first = (row + index) * key.width + Int64(first_block * BLOCK)
                moe_math.fetch_scales(scales, first, key.up.blocks * BLOCK, lane)

        def address(row: Int32) -> Int64:
            return part.rotated + (_input_entry(part, first_slot + row, key) + Int64(which)) * (2 * key.padded_hidden)

        multiply_strip(
            words,
            linear,
            lambda columns: lane_rows(rows, lane, columns, key, address),
            s_sums + warp * warp_bytes("up", key),
            (first_block + place) * _BLOCK_STRIPS + strip % _BLOCK_STRIPS,
            rows,
            steps[0] + warp // strips,
            steps[1],
            Int32(key.up.slices),
            lane,
            s_table,
            key.up_rates,
            key.width // 16,
            key.up,
            key,
        )
        cute.arch.sync_threads()
        _finish_rows(
            scales, gate_bias, up_bias, scratch, max_tokens, s_sums, expert, first_slot, rows, first_block,
            split_index, group, s_last, thread, key,
        )  # fmt: skip
