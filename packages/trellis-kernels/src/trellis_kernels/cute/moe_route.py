"""Owns the first launch of a few-token layer: routes to groups of one expert, and every input rotated.

It must not know codes.  Block 0 groups; the other blocks rotate, clear the counters, and write zeros for tokens that no
expert serves.  The order of an expert's routes depends on the timing of atomics; no result does, because a row's
arithmetic does not depend on its place.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes, moe_math
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.moe_arguments import MoeArguments, expert_of, live_routes, load_value
from trellis_kernels.cute.moe_key import MoeSmallKey, counters_per_token
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_middle import store_block
from trellis_kernels.cute.moe_scratch import DESCRIPTOR_BYTES, GROUP_BYTES, SLOT_BYTES, Scratch, scratch_at

__all__ = ["ROUTE_THREADS", "rotated_block", "route_blocks", "route_kernel"]

ROUTE_THREADS = 256
"""Threads of a block."""
_WARPS = ROUTE_THREADS // 32
_MOST_BLOCKS = 1056  # eight a multiprocessor of the largest chips; above, warps take several tasks


def route_blocks(key: MoeSmallKey, tokens: int) -> int:
    """Blocks of the launch."""
    rows = tokens if key.shared_inputs else tokens * key.top_k
    row_blocks = rows * key.rotated_inputs if key.is_bytes else -(-rows * (key.padded_hidden // BLOCK) // _WARPS)
    return 1 + min(row_blocks + -(-tokens // _WARPS), _MOST_BLOCKS)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _load_channels(x: Int64, token: Int32, channel: Int32, key: MoeSmallKey) -> list[Float32]:
    """Four channels of a row of x in fp32, zeros past its width."""
    row = Int64(token) * key.hidden
    if key.hidden % LANE_CHANNELS == 0:
        inside = channel < key.hidden
        at = cutlass.min(channel, key.hidden - LANE_CHANNELS)
        size = VALUE_BYTES[key.x_dtype]
        words = gpu.load_words(x + (row + Int64(at)) * size, LANE_CHANNELS * size // 4, read_only=False)
        values = [value for word in words for value in _word_values(word, key.x_dtype)]
        scale = Float32(Int32(inside))
        return [value * scale for value in values] if key.hidden < key.padded_hidden else values
    values = []
    for index in range(LANE_CHANNELS):
        at = cutlass.min(channel + index, key.hidden - 1)
        value = load_value(x, row + Int64(at), key.x_dtype)
        values.append(value * Float32(Int32(channel + index < key.hidden)))
    return values


def _word_values(word: Uint32, dtype: str) -> list[Float32]:
    return [gpu.float_from(word, dtype, 0)] if dtype == "float32" else gpu.floats_from(word, dtype)


def rotated_block(
    args: MoeArguments, token: Int32, expert: Int32, which: Any, block: Int32, lane: Int32, key: MoeSmallKey
) -> list[Float32]:
    """Four channels of one block of one row: H (x * suh)."""
    channel = block * BLOCK + lane * LANE_CHANNELS
    vector = which if key.shared_inputs else expert * key.rotated_inputs + which
    suh = moe_math.load_scales(args.input_scales, Int64(vector) * key.padded_hidden + Int64(channel))
    values = _load_channels(args.x, token, channel, key)
    return moe_math.hadamard([a * b for a, b in zip(values, suh, strict=True)], moe_math.hadamard_signs(lane))


def _rotate(
    args: MoeArguments, part: Scratch, token: Int32, expert: Int32, row: Int32, block: Int32, lane: Int32,
    key: MoeSmallKey,
) -> None:  # fmt: skip
    """Write one block of every rotated input of a row in fp16, in the order that the GEMM reads."""
    blocks = [rotated_block(args, token, expert, which, block, lane, key) for which in range(key.rotated_inputs)]
    for which, values in enumerate(blocks):
        entry = Int64(row) * key.rotated_inputs + which
        store_block(part.rotated + entry * (2 * key.padded_hidden), block, lane, values)


def _scan_warp(value: Int32, lane: Int32) -> Int32:
    """Inclusive sums over the lanes."""
    for distance in (1, 2, 4, 8, 16):
        below = Int32(gpu.pull_from_lane(Uint32(value), (lane - distance) & 31))
        value = value + below * Int32(lane >= distance)
    return value


@cute.jit
def _group(
    args: MoeArguments,
    thread: Int32,
    s_counts: Int32,
    s_cursors: Int32,
    s_warps: Int32,
    key: Constexpr,
):
    """Counting sort of the routes by expert, by one block."""
    part = scratch_at(args, key)
    routes = args.tokens * key.top_k
    lane = thread & 31
    warp = thread >> 5
    each = -(-key.max_experts // ROUTE_THREADS)
    linears = key.projections + 1
    places = []
    for index in cutlass.range_constexpr(each):
        expert = thread * each + index
        known = Int64(cutlass.min(expert, args.experts - 1))
        for linear in cutlass.range_constexpr(linears):
            place = args.descriptors + (known * linears + linear) * DESCRIPTOR_BYTES
            places.append(gpu.load_words(place, 4))
        if expert < args.experts:
            gpu.store_shared_int(s_counts + expert * 4, Int32(0))
    cute.arch.sync_threads()
    for route in cutlass.range(thread, routes, ROUTE_THREADS, unroll=1):
        expert = expert_of(args, route, key)
        if expert >= 0:
            gpu.add_shared_counter(s_counts + expert * 4, Int32(1))
    cute.arch.sync_threads()
    own_routes = Int32(0)
    own_groups = Int32(0)
    for index in cutlass.range_constexpr(each):
        expert = thread * each + index
        if expert < args.experts:
            count = gpu.load_shared_int(s_counts + expert * 4)
            own_routes = own_routes + count
            own_groups = own_groups + (count + key.group_rows - 1) // key.group_rows
    route_sum = _scan_warp(own_routes, lane)
    group_sum = _scan_warp(own_groups, lane)
    if lane == 31:
        gpu.store_shared_int(s_warps + warp * 8, route_sum)
        gpu.store_shared_int(s_warps + warp * 8 + 4, group_sum)
    cute.arch.sync_threads()
    first_slot = route_sum - own_routes
    group = group_sum - own_groups
    for other in cutlass.range_constexpr(_WARPS):
        before = Int32(Int32(other) < warp)
        first_slot = first_slot + before * gpu.load_shared_int(s_warps + other * 8)
        group = group + before * gpu.load_shared_int(s_warps + other * 8 + 4)
    for index in cutlass.range_constexpr(each):
        expert = thread * each + index
        if expert < args.experts:
            count = gpu.load_shared_int(s_counts + expert * 4)
            gpu.store_shared_int(s_cursors + expert * 4, first_slot)
            groups = (count + key.group_rows - 1) // key.group_rows
            for turn in cutlass.range(groups, unroll=1):
                first = turn * key.group_rows
                rows = cutlass.min(count - first, key.group_rows)
                words = [Uint32(expert), Uint32(first_slot + first), Uint32(rows), Uint32(0)]
                entry = part.groups + Int64(group + turn) * GROUP_BYTES
                gpu.store_words(entry, words)
                for linear in cutlass.range_constexpr(linears):
                    gpu.store_words(entry + (16 + linear * DESCRIPTOR_BYTES), places[index * linears + linear])
            first_slot = first_slot + count
            group = group + groups
    if thread == ROUTE_THREADS - 1:
        gpu.store_words(part.header, [Uint32(group)])
    cute.arch.sync_threads()
    for route in cutlass.range(thread, routes, ROUTE_THREADS, unroll=1):
        expert = expert_of(args, route, key)
        if expert >= 0:
            slot = gpu.add_shared_counter(s_cursors + expert * 4, Int32(1))
            weight = load_value(args.weights, route, key.weight_dtype) * args.factor
            words = [
                Uint32(route),
                live_routes(args, route // key.top_k, key),
                *gpu.float_to([weight], "float32"),
                Uint32(0),
            ]
            gpu.store_words(part.slots + Int64(slot) * SLOT_BYTES, words)


@cute.jit
def _rotate_row(
    args: MoeArguments,
    token: Int32,
    expert: Int32,
    row: Int32,
    which: Int32,
    s_warps: Int32,
    thread: Int32,
    key: Constexpr,
):
    """Write one rotated row as bytes and its law, by one thread block, whose warps take its blocks of 128 in turn."""
    part = scratch_at(args, key)
    lane = thread & 31
    warp = thread >> 5
    hidden_blocks = key.padded_hidden // BLOCK
    each = -(-hidden_blocks // _WARPS)
    blocks = []
    most = Float32(0.0)
    for index in cutlass.range_constexpr(each):
        block = cutlass.min(index * _WARPS + warp, hidden_blocks - 1)  # past the end the last one again
        blocks.append(rotated_block(args, token, expert, which, block, lane, key))
        for value in blocks[index]:
            most = gpu.larger(most, gpu.magnitude(value))
    for mask in (1, 2, 4, 8, 16):
        most = gpu.larger(most, gpu.lane_swap(most, mask))
    if lane == 0:
        gpu.store_shared_floats(s_warps + warp * 8, [most])
    cute.arch.sync_threads()
    for other in cutlass.range_constexpr(_WARPS):
        most = gpu.larger(most, gpu.load_shared_floats(s_warps + other * 8, 1)[0])
    step = moe_bytes.step_of(most)
    inverse = Float32(1.0) / step
    entry = Int64(row) * key.rotated_inputs + Int64(which)
    total = Int32(0)
    for index in cutlass.range_constexpr(each):
        block = index * _WARPS + warp
        inside = Boolean(block < hidden_blocks)
        whole = [gpu.round_to_int(value * inverse) for value in blocks[index]]
        for value in whole:
            total = total + value * Int32(inside)
        target = part.rotated + entry * (2 * key.padded_hidden) + Int64(block * (2 * BLOCK))
        first = target + Int64(moe_bytes.stored_byte_offset(lane))
        for low, values in enumerate((moe_bytes.high_bytes(whole), whole)):
            word = gpu.pack_bytes(values)
            gpu.store_half(first + 16 * low, word, inside)
            gpu.store_half(first + (16 * low + 4), word >> 16, inside)
    for mask in (1, 2, 4, 8, 16):
        total = total + gpu.swap_int(total, mask)
    if lane == 0:
        gpu.store_shared_int(s_warps + warp * 8 + 4, total)
    cute.arch.sync_threads()
    if thread == 0:
        sums = Int32(0)
        for other in cutlass.range_constexpr(_WARPS):
            sums = sums + gpu.load_shared_int(s_warps + other * 8 + 4)
        moe_bytes.store_law(part.rotated_laws + entry * moe_bytes.LAW_BYTES, step, sums)
    cute.arch.sync_threads()


@cute.jit
def _clear_token(args: MoeArguments, token: Int32, lane: Int32, key: Constexpr):
    """Zeros for a token that no expert serves."""
    if live_routes(args, token, key) == 0:
        row = Int64(token) * key.hidden
        for channel in cutlass.range(lane, key.hidden, 32, unroll=1):
            if cutlass.const_expr(key.out_dtype == "float32"):
                gpu.store_words(args.out + (row + Int64(channel)) * 4, [Uint32(0)])
            else:
                gpu.store_half(args.out + (row + Int64(channel)) * 2, Uint32(0))


@cute.kernel
def route_kernel(key: Constexpr, args: MoeArguments):
    """Block 0 groups; the others rotate, clear and write zeros."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    smem = cutlass.memory.SmemAllocator()
    s_counts = smem.allocate_array(Int32, key.max_experts, byte_alignment=16).toint()
    s_cursors = smem.allocate_array(Int32, key.max_experts, byte_alignment=16).toint()
    s_warps = smem.allocate_array(Int32, 2 * _WARPS, byte_alignment=16).toint()
    part = scratch_at(args, key)
    if cutlass.const_expr(key.overlaps):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    if block == 0:
        _group(args, thread, s_counts, s_cursors, s_warps, key)
    else:
        lane = thread & 31
        counters = args.max_tokens * counters_per_token(key)
        for index in cutlass.range(
            (block - 1) * ROUTE_THREADS + thread, counters, (blocks - 1) * ROUTE_THREADS, unroll=1
        ):
            gpu.store_words(part.up_arrivals + Int64(index) * 4, [Uint32(0)])
        rows = args.tokens if cutlass.const_expr(key.shared_inputs) else args.tokens * key.top_k
        hidden_blocks = key.padded_hidden // BLOCK
        row_tasks = key.rotated_inputs if cutlass.const_expr(key.is_bytes) else hidden_blocks
        tasks = rows * row_tasks
        warp = cute.arch.make_warp_uniform((block - 1) * _WARPS + (thread >> 5))
        if cutlass.const_expr(key.is_bytes):
            for task in cutlass.range(block - 1, tasks, blocks - 1, unroll=1):
                row = task // row_tasks
                which = task - row * row_tasks
                if cutlass.const_expr(key.shared_inputs):
                    _rotate_row(args, row, Int32(0), row, which, s_warps, thread, key)
                else:
                    expert = expert_of(args, row, key)
                    if expert >= 0:
                        token = row // key.top_k
                        _rotate_row(args, token, expert, row, which, s_warps, thread, key)
            for token in cutlass.range(warp, args.tokens, (blocks - 1) * _WARPS, unroll=1):
                _clear_token(args, token, lane, key)
        else:
            for task in cutlass.range(warp, tasks + args.tokens, (blocks - 1) * _WARPS, unroll=1):
                if task < tasks:
                    row = task // row_tasks
                    hidden_block = task - row * row_tasks
                    if cutlass.const_expr(key.shared_inputs):
                        _rotate(args, part, row, Int32(0), row, hidden_block, lane, key)
                    else:
                        expert = expert_of(args, row, key)
                        if expert >= 0:
                            _rotate(args, part, row // key.top_k, expert, row, hidden_block, lane, key)
                else:
                    _clear_token(args, task - tasks, lane, key)
