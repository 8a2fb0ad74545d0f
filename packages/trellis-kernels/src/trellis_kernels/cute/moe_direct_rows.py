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
from trellis_kernels.cute.moe_arguments import MoeArguments
from trellis_kernels.cute.moe_gemm import load_block_sums
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_kernels.cute.moe_middle import join_block
from trellis_kernels.cute.moe_route import rotated_block
from trellis_kernels.cute.moe_split import add_parts

__all__ = [
    "LAW_WORDS",
    "block_products",
    "join_row",
    "lane_offset",
    "load_law",
    "most_share_blocks",
    "rotate_rows",
    "row_blocks",
    "share_blocks",
]

LAW_WORDS = 2
"""Of a row's law: the largest magnitude in fp32, the sum of its whole activations."""
_BLOCK_BYTES = 2 * BLOCK
_LAW_BYTES = 4 * LAW_WORDS
_LANE_MASKS = (1, 2, 4, 8, 16)


def most_share_blocks(key: MoeSmallKey) -> int:
    """Most blocks of 128 input channels of a share of gate and up."""
    return -(-(key.padded_hidden // BLOCK) // key.up.split)


def share_blocks(key: MoeSmallKey, index: Int32) -> tuple[Int32, Int32]:
    """First block and end of one share of the input channels of gate and up."""
    blocks = key.padded_hidden // BLOCK
    return blocks * index // key.up.split, blocks * (index + 1) // key.up.split


def row_blocks(key: MoeSmallKey) -> int:
    """Most blocks of the joined row that a warp of down makes."""
    return -(-(key.width // BLOCK) // (key.threads("down") // 32))


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def lane_offset(lane: Int32, key: MoeSmallKey) -> Int32:
    """Bytes from a step of a row to this lane's B operand."""
    within = (lane & 3) * 32
    return within + ((lane >> 2) & 1) * 16 if key.is_bytes else within


def load_law(s_law: Int32) -> tuple[Float32, Int32]:
    """Step, and sum of the whole activations, of a row."""
    return moe_bytes.step_of(gpu.load_shared_floats(s_law, 1)[0]), gpu.load_shared_int(s_law + 4)


def block_products(s_sums: Int32, s_law: Int32, lane: Int32, strip: Any, gemm: str, key: MoeSmallKey) -> list[Float32]:
    """Four channels of the row's products from the sums, whose strips begin with `strip`."""
    sums = load_block_sums(s_sums, Int32(0), lane, strip, gemm, key)
    return moe_bytes.apply_step(sums, *load_law(s_law)) if key.is_bytes else sums


def _raise_most(values: list[Float32], s_law: Int32, lane: Int32) -> None:
    """Raise a row's largest magnitude to that of a warp's values."""
    most = Float32(0.0)
    for value in values:
        most = gpu.larger(most, gpu.magnitude(value))
    for mask in _LANE_MASKS:
        most = gpu.larger(most, gpu.lane_swap(most, mask))
    gpu.raise_shared_most(s_law, most, Boolean(lane == 0))


def _store_block(s_block: Int32, lane: Int32, values: list[Float32], is_real: Any, s_law: Int32, key: Any) -> None:
    """Four channels of a block in the order that the GEMM reads, and for bytes their share of the law."""
    if not key.is_bytes:
        s_first = s_block + moe_math.stored_offset(lane)
        for place, word in enumerate(moe_math.stored_words(values)):
            gpu.store_shared_words(s_first + 8 * place, [word])
        return
    inverse = Float32(1.0) / load_law(s_law)[0]
    whole = [gpu.round_to_int(value * inverse) for value in values]
    first = s_block + moe_bytes.stored_byte_offset(lane)
    for low, four in enumerate((moe_bytes.high_bytes(whole), whole)):
        word = gpu.pack_bytes(four)
        gpu.store_shared_half(first + 16 * low, word)
        gpu.store_shared_half(first + (16 * low + 4), word >> 16)
    total = whole[0] + whole[1] + whole[2] + whole[3]
    for mask in _LANE_MASKS:
        total = total + gpu.swap_int(total, mask)
    gpu.add_shared_total(s_law + 4, total * Int32(is_real), Boolean(lane == 0))


@cute.jit
def rotate_rows(
    args: MoeArguments,
    token: Int32,
    expert: Int32,
    first_block: Int32,
    end_block: Int32,
    s_rows: Int32,
    s_laws: Int32,
    thread: Int32,
    key: Constexpr,
):
    """Every rotated input over one share of the channels, `[rotated inputs, share] float16` or two bytes a channel.

    By the whole thread block, which may read the rows when this returns; `s_laws` holds zeros that all have seen.
    """
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    most_blocks = most_share_blocks(key)
    warps = key.threads("up") // 32
    each = -(-most_blocks * key.rotated_inputs // warps)
    blocks = []
    for index in cutlass.range_constexpr(each):
        which, block, _ = _task(index * warps + warp, first_block, end_block, key)
        blocks.append(rotated_block(args, token, expert, which, block, lane, key))
    if cutlass.const_expr(key.is_bytes):
        for index in cutlass.range_constexpr(each):
            which, _, _ = _task(index * warps + warp, first_block, end_block, key)
            _raise_most(blocks[index], s_laws + which * _LAW_BYTES, lane)
        cute.arch.sync_threads()
    for index in cutlass.range_constexpr(each):
        which, block, is_real = _task(index * warps + warp, first_block, end_block, key)
        s_block = s_rows + (which * most_blocks + block - first_block) * _BLOCK_BYTES
        _store_block(s_block, lane, blocks[index], is_real, s_laws + which * _LAW_BYTES, key)
    cute.arch.sync_threads()


def _task(index: Any, first_block: Int32, end_block: Int32, key: MoeSmallKey) -> tuple[Int32, Int32, Boolean]:
    """Which input and block a task rotates; past the last one that again, which writes what is there."""
    blocks = end_block - first_block
    last = blocks * key.rotated_inputs - 1
    task = cutlass.min(index, last)
    which = task // blocks if key.rotated_inputs > 1 else Int32(0)
    return which, first_block + task - which * blocks, Boolean(index <= last)


@cute.jit
def join_row(
    args: MoeArguments,
    g_parts: Int64,
    vectors: Constexpr,
    expert: Int32,
    route: Int32,
    s_row: Int32,
    s_law: Int32,
    thread: Int32,
    key: Constexpr,
):
    """The input row of down from everyone's sums of gate and up, which are added in the order of the shares.

    By the whole thread block of down, which may read the row when this returns; `s_law` holds zeros that all have seen.
    `vectors` are those of `load_vectors` for each block of this warp, already loaded.
    """
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = key.threads("down") // 32
    last = key.width // BLOCK - 1
    joined = []
    for index in cutlass.range_constexpr(row_blocks(key)):
        block = cutlass.min(index * warps + warp, last)
        channel = block * BLOCK + lane * LANE_CHANNELS
        sums = [add_parts(g_parts, route, linear, channel, "up", key) for linear in range(key.projections)]
        joined.append(join_block(args, sums, vectors[index], expert, block, lane, key))
    if cutlass.const_expr(key.is_bytes):
        for index in cutlass.range_constexpr(row_blocks(key)):
            _raise_most(joined[index], s_law, lane)
        cute.arch.sync_threads()
    for index in cutlass.range_constexpr(row_blocks(key)):
        place = index * warps + warp
        block = cutlass.min(place, last)
        _store_block(s_row + block * _BLOCK_BYTES, lane, joined[index], Boolean(place <= last), s_law, key)
    cute.arch.sync_threads()
