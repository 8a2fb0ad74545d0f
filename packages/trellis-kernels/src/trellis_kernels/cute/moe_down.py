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
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

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
from trellis_kernels.cute.moe_scratch import (
    GROUP_BYTES,
    SLOT_BYTES,
    VALUE_BYTES,
    Scratch,
    load_place,
    scratch_at,
)  # fmt: skip
from trellis_kernels.cute.moe_up import ready_count

__all__ = ["down_kernel", "down_shared_bytes", "store_out", "sum_token"]

_BLOCK_STRIPS = BLOCK // STRIP_CHANNELS


def down_shared_bytes(key: MoeSmallKey) -> int:
    """Shared memory of a thread block."""
    return shared_bytes("down", key) + 4 * key.group_rows * key.down.blocks + 16 + table_bytes(key)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _part_address(part: Scratch, slot: Int32, index: Any, channel: Int32, key: MoeSmallKey) -> Int64:
    row = Int64(slot) * key.down.split + Int64(index)
    return part.down_parts + (row * key.padded_hidden + Int64(channel)) * 4


def _ordered_parts(part: Scratch, slot: Int32, channel: Int32, key: MoeSmallKey) -> list[Float32]:
    """Everyone's sums of four channels, added in order."""
    pieces = [
        gpu.load_floats(_part_address(part, slot, index, channel, key), 4, bypass_l1=True)
        for index in range(key.down.split)
    ]
    total = pieces[0]
    for piece in pieces[1:]:
        total = [a + b for a, b in zip(total, piece, strict=True)]
    return total


def _result_address(results: Int64, route: Int32, channel: Int32, key: MoeSmallKey) -> Int64:
    return results + (Int64(route) * key.padded_hidden + Int64(channel)) * 4


def _finish(
    sums: list[Float32],
    scales: Int64,
    bias: Int64,
    part: Scratch,
    expert: Int32,
    slot: Int32,
    channel: Int32,
    lane: Int32,
    key: MoeSmallKey,
) -> None:
    """From sums in the rotated basis to the weighted row, for one block of one row."""
    record = gpu.load_words(part.slots + Int64(slot) * SLOT_BYTES, 4)
    row = Int64(0) if key.shared_outputs else Int64(expert) * key.padded_hidden
    svh = moe_math.load_scales(scales, row + Int64(channel))
    values = [a * b for a, b in zip(moe_math.hadamard(sums, moe_math.hadamard_signs(lane)), svh, strict=True)]
    if key.biased[2]:
        addend = moe_math.load_scales(bias, Int64(expert) * key.padded_hidden + Int64(channel))
        values = [a + b for a, b in zip(values, addend, strict=True)]
    weight = gpu.float_from(record[2], "float32", 0)
    gpu.store_floats(
        _result_address(part.results, Int32(record[0]), channel, key), [value * weight for value in values]
    )


def store_out(out: Int64, token: Int32, channel: Int32, values: list[Float32], key: MoeSmallKey) -> None:
    """Four channels of a row of the result, those inside its width."""
    size = VALUE_BYTES[key.out_dtype]
    row = Int64(token) * key.hidden
    words = gpu.float_to(values, key.out_dtype)
    if key.hidden % LANE_CHANNELS == 0:
        gpu.store_words(out + (row + Int64(channel)) * size, words, Boolean(channel < key.hidden))
        return
    for index in range(LANE_CHANNELS):
        inside = Boolean(channel + index < key.hidden)
        target = out + (row + Int64(channel + index)) * size
        if key.out_dtype == "float32":
            gpu.store_words(target, [words[index]], inside)
        else:
            gpu.store_half(target, words[index // 2] >> (16 * (index % 2)), inside)


@cute.jit
def sum_token(out: Int64, results: Int64, token: Int32, live: Uint32, channel: Int32, key: Constexpr):
    """One block of one token: its weighted rows in the order of its slots, in fp32."""
    rows = []
    for slot in cutlass.range_constexpr(key.top_k):
        route = token * key.top_k + slot
        rows.append(gpu.load_floats(_result_address(results, route, channel, key), 4, bypass_l1=True))
    total = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
    for slot in cutlass.range_constexpr(key.top_k):
        for index in cutlass.range_constexpr(LANE_CHANNELS):
            total[index] = total[index] + gpu.choose(live, slot, rows[slot][index])
    store_out(out, token, channel, total, key)


@cute.jit
def _finish_rows(
    scales: Int64,
    bias: Int64,
    out: Int64,
    scratch: Int64,
    max_tokens: Int32,
    s_sums: Int32,
    s_flags: Int32,
    expert: Int32,
    first_slot: Int32,
    rows: Int32,
    first_block: Int32,
    split_index: Int32,
    group: Int32,
    thread: Int32,
    key: Constexpr,
):
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = key.threads("down") // 32
    part = scratch_at(scratch, max_tokens, key)
    tasks = rows * key.down.blocks
    hidden_blocks = key.padded_hidden // BLOCK
    is_last = Int32(1)
    if cutlass.const_expr(key.down.split > 1):
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            row = task // key.down.blocks
            place = task - row * key.down.blocks
            channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
            sums = load_block_sums(s_sums, row, lane, place * _BLOCK_STRIPS, "down", key)
            gpu.store_floats(_part_address(part, first_slot + row, split_index, channel, key), sums)
        cute.arch.sync_threads()
        if thread == 0:
            counter = part.down_arrivals + Int64(group * hidden_blocks + first_block) * 4
            gpu.store_shared_int(s_flags, gpu.add_counter(counter, Int32(1)))
        cute.arch.sync_threads()
        is_last = Int32(gpu.load_shared_int(s_flags) == key.down.split - 1)
        cute.arch.sync_threads()
    if is_last == 1:
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            row = task // key.down.blocks
            place = task - row * key.down.blocks
            channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
            if cutlass.const_expr(key.down.split > 1):
                sums = _ordered_parts(part, first_slot + row, channel, key)
            else:
                sums = load_block_sums(s_sums, row, lane, place * _BLOCK_STRIPS, "down", key)
            if cutlass.const_expr(key.is_bytes):
                sums = moe_bytes.apply_law(sums, part.joined_laws + Int64(first_slot + row) * moe_bytes.LAW_BYTES)
            _finish(sums, scales, bias, part, expert, first_slot + row, channel, lane, key)
        cute.arch.sync_threads()
        for task in cutlass.range(thread, tasks, key.threads("down"), unroll=1):
            row = task // key.down.blocks
            place = task - row * key.down.blocks
            record = gpu.load_words(part.slots + Int64(first_slot + row) * SLOT_BYTES, 2)
            token = Int32(record[0]) // key.top_k
            counter = part.token_arrivals + Int64(token * hidden_blocks + first_block + place) * 4
            is_complete = Int32(gpu.add_counter(counter, Int32(1)) == gpu.count_bits(record[1]) - 1)
            gpu.store_shared_int(s_flags + task * 4, is_complete)
        cute.arch.sync_threads()
        for task in cutlass.range(warp, tasks, warps, unroll=1):
            if gpu.load_shared_int(s_flags + task * 4) == 1:
                row = task // key.down.blocks
                place = task - row * key.down.blocks
                channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
                record = gpu.load_words(part.slots + Int64(first_slot + row) * SLOT_BYTES, 2)
                sum_token(out, part.results, Int32(record[0]) // key.top_k, record[1], channel, key)


@cute.kernel
def down_kernel(
    words: Int64,
    g_table: Int64,
    scales: Int64,
    bias: Int64,
    out: Int64,
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
    s_sums = smem.allocate_array(Float32, shared_bytes("down", key) // 4, byte_alignment=16).toint()
    s_flags = smem.allocate_array(Int32, key.group_rows * key.down.blocks, byte_alignment=16).toint()
    s_table = smem.allocate_array(Int32, table_bytes(key) // 4, byte_alignment=16).toint()
    fill_table(g_table, s_table, thread, key.threads("down"), key)
    part = scratch_at(scratch, max_tokens, key)
    strips = key.strips("down")
    strip = warp % strips
    entry = gpu.load_fresh_ints(part.groups + Int64(group) * GROUP_BYTES, 4)
    linear = load_place(part, group, key.projections)
    groups = gpu.load_fresh_ints(part.header, 1)[0]
    if group < groups:
        expert = entry[0]
        first_slot = entry[1]
        rows = entry[2]
        first_block = column // key.down.split * key.down.blocks
        split_index = column % key.down.split
        steps = split_steps(key.width, key.down.split, split_index)

        if warp == 0:
            row = Int64(0) if cutlass.const_expr(key.shared_outputs) else Int64(expert) * key.padded_hidden
            moe_math.fetch_scales(scales, row + Int64(first_block * BLOCK), key.down.blocks * BLOCK, lane)

        def address(row: Int32) -> Int64:
            rows_at = part.joined_bytes if key.is_bytes else part.joined
            return rows_at + Int64(first_slot + row) * (2 * key.width)

        def find_rows(columns: int) -> Any:
            gpu.wait_for_counter(part.group_ready + Int64(group) * 4, ready_count(key))
            return lane_rows(rows, lane, columns, key, address)

        multiply_strip(
            words,
            linear,
            find_rows,
            s_sums + warp * warp_bytes("down", key),
            first_block * _BLOCK_STRIPS + strip,
            rows,
            steps[0] + warp // strips,
            steps[1],
            Int32(key.down.slices),
            lane,
            s_table,
            key.down_rates,
            key.padded_hidden // 16,
            key.down,
            key,
        )
        cute.arch.sync_threads()
        _finish_rows(
            scales, bias, out, scratch, max_tokens, s_sums, s_flags, expert, first_slot, rows,
            first_block, split_index, group, thread, key,
        )  # fmt: skip
