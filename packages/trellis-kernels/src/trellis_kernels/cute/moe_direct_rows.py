"""Owns the rows of a direct layer in shared memory: rotated inputs of gate and up, and the joined row for down.

It must not know codes.  A thread block multiplies one row, so it makes the row itself, where its warps read it.  For
byte products a row has a step and the sum of its whole activations, its law, in shared memory too; see `moe_bytes`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_bytes, moe_math
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_route import rotated_block

__all__ = ["LAW_WORDS", "lane_offset", "load_law", "most_share_blocks", "rotate_rows", "share_blocks", "take_row"]

LAW_WORDS = 2
"""Of a row's law: the largest magnitude in fp32, the sum of its whole activations."""
_BLOCK_BYTES = 2 * BLOCK
_CHUNK = 8  # channels that a thread moves at once
_LANE_MASKS = (1, 2, 4, 8, 16)


def most_share_blocks(key: MoeSmallKey) -> int:
    """Most blocks of 128 input channels of a share of gate and up."""
    return -(-(key.padded_hidden // BLOCK) // key.up.split)


def share_blocks(key: MoeSmallKey, index: Int32) -> tuple[Int32, Int32]:
    """First block and end of one share of the input channels of gate and up."""
    blocks = key.padded_hidden // BLOCK
    return blocks * index // key.up.split, blocks * (index + 1) // key.up.split


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def lane_offset(lane: Int32, key: MoeSmallKey) -> Int32:
    """Bytes from a step of a row to this lane's B operand."""
    within = (lane & 3) * 32
    return within + ((lane >> 2) & 1) * 16 if key.is_bytes else within


def load_law(s_law: Int32) -> tuple[Float32, Int32]:
    """Step, and sum of the whole activations, of a row."""
    return moe_bytes.step_of(gpu.load_shared_floats(s_law, 1)[0]), gpu.load_shared_int(s_law + 4)


def _most(values: list[Float32], most: Float32) -> Float32:
    for value in values:
        most = gpu.larger(most, gpu.magnitude(value))
    return most


def _warp_most(most: Float32) -> Float32:
    for mask in _LANE_MASKS:
        most = gpu.larger(most, gpu.lane_swap(most, mask))
    return most


def _warp_total(total: Int32) -> Int32:
    for mask in _LANE_MASKS:
        total = total + gpu.swap_int(total, mask)
    return total


def _whole(values: list[Float32], step: Float32) -> list[Int32]:
    inverse = Float32(1.0) / step
    return [gpu.round_to_int(value * inverse) for value in values]


def _add(whole: list[Int32]) -> Int32:
    total = whole[0]
    for value in whole[1:]:
        total = total + value
    return total


def _store_block_bytes(s_block: Int32, lane: Int32, whole: list[Int32]) -> None:
    """Four channels of a block as hi and lo."""
    first = s_block + moe_bytes.stored_byte_offset(lane)
    for low, values in enumerate((moe_bytes.high_bytes(whole), whole)):
        word = gpu.pack_bytes(values)
        gpu.store_shared_half(first + 16 * low, word)
        gpu.store_shared_half(first + (16 * low + 4), word >> 16)


@cute.jit
def rotate_rows(
    x: Int64,
    scales: Int64,
    token: Int32,
    expert: Int32,
    first_block: Int32,
    end_block: Int32,
    s_rows: Int32,
    s_laws: Int32,
    thread: Int32,
    threads: Constexpr,
    key: Constexpr,
):
    """Every rotated input over one share of the channels, `[rotated inputs, share] float16` or two bytes a channel.

    By the whole thread block, which may read the rows when this returns; `s_laws` holds zeros that all have seen.
    """
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    most_blocks = most_share_blocks(key)
    warps = threads // 32
    each = -(-most_blocks * key.rotated_inputs // warps)
    blocks = []
    for index in cutlass.range_constexpr(each):
        which, block, _ = _task(index * warps + warp, first_block, end_block, key)
        blocks.append(rotated_block(x, scales, token, expert, which, block, lane, key))
    if cutlass.const_expr(key.is_bytes):
        for index in cutlass.range_constexpr(each):
            which, _, _ = _task(index * warps + warp, first_block, end_block, key)
            most = _warp_most(_most(blocks[index], Float32(0.0)))
            if lane == 0:
                gpu.raise_shared_most(s_laws + which * (4 * LAW_WORDS), most)
        cute.arch.sync_threads()
    for index in cutlass.range_constexpr(each):
        which, block, is_real = _task(index * warps + warp, first_block, end_block, key)
        s_block = s_rows + (which * most_blocks + block - first_block) * _BLOCK_BYTES
        if cutlass.const_expr(key.is_bytes):
            step, _ = load_law(s_laws + which * (4 * LAW_WORDS))
            whole = _whole(blocks[index], step)
            total = _warp_total(_add(whole)) * Int32(is_real)
            _store_block_bytes(s_block, lane, whole)
            if lane == 0:
                gpu.add_shared_total(s_laws + which * (4 * LAW_WORDS) + 4, total)
        else:
            s_first = s_block + moe_math.stored_offset(lane)
            for place, word in enumerate(moe_math.stored_words(blocks[index])):
                gpu.store_shared_words(s_first + 8 * place, [word])
    cute.arch.sync_threads()


def _task(index: Any, first_block: Int32, end_block: Int32, key: MoeSmallKey) -> tuple[Int32, Int32, Boolean]:
    """Which input and block a task rotates; past the last one that again, which writes what is there."""
    blocks = end_block - first_block
    last = blocks * key.rotated_inputs - 1
    task = cutlass.min(index, last)
    which = task // blocks if key.rotated_inputs > 1 else Int32(0)
    return which, first_block + task - which * blocks, Boolean(index <= last)


@cute.jit
def take_row(g_row: Int64, s_row: Int32, s_law: Int32, thread: Int32, threads: Constexpr, key: Constexpr):
    """The joined row of a route from global to shared memory, as bytes and a law for byte products.

    By the whole thread block, which may read the row when this returns; `s_law` holds zeros that all have seen.
    """
    each = -(-key.width // (_CHUNK * threads))
    chunks = []
    for index in cutlass.range_constexpr(each):
        first = cutlass.min((index * threads + thread) * _CHUNK, key.width - _CHUNK)
        chunks.append(gpu.load_fresh_words(g_row + Int64(first) * 2, 4))
    if cutlass.const_expr(key.is_bytes):
        lane = thread & 31
        most = Float32(0.0)
        for index in cutlass.range_constexpr(each):
            for word in chunks[index]:
                most = _most(gpu.floats_from(word, "float16"), most)
        most = _warp_most(most)
        if lane == 0:
            gpu.raise_shared_most(s_law, most)
        cute.arch.sync_threads()
        step, _ = load_law(s_law)
        total = Int32(0)
        for index in cutlass.range_constexpr(each):
            place = (index * threads + thread) * _CHUNK
            first = cutlass.min(place, key.width - _CHUNK)
            whole = _whole([value for word in chunks[index] for value in gpu.floats_from(word, "float16")], step)
            total = total + _add(whole) * Int32(place < key.width)
            high = moe_bytes.high_bytes(whole)
            s_target = s_row + (first // 16) * 32 + first % 16
            gpu.store_shared_words(s_target, [gpu.pack_bytes(high[:4]), gpu.pack_bytes(high[4:])])
            gpu.store_shared_words(s_target + 16, [gpu.pack_bytes(whole[:4]), gpu.pack_bytes(whole[4:])])
        total = _warp_total(total)
        if lane == 0:
            gpu.add_shared_total(s_law + 4, total)
    else:
        for index in cutlass.range_constexpr(each):
            first = cutlass.min((index * threads + thread) * _CHUNK, key.width - _CHUNK)
            gpu.store_shared_words(s_row + first * 2, chunks[index])
    cute.arch.sync_threads()
