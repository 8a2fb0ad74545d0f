"""Owns sums of products that thread blocks share by input channels: where each leaves its part, and their addition.

It must not know what becomes of the sums.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.gemm_share import STRIP_CHANNELS
from trellis_kernels.cute.moe_gemm import add_in_order, load_block_sums
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS

__all__ = ["BLOCK_STRIPS", "add_parts", "block_sums", "leave_parts", "part_address"]

BLOCK_STRIPS = BLOCK // STRIP_CHANNELS
"""Strips of a block of 128 output channels."""


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def part_address(
    g_parts: Int64, row: Int32, rank: Any, linear: Any, channel: Int32, gemm: str, key: MoeSmallKey
) -> Int64:
    """Of a channel of a row's sums over one share of the input channels, `[rows, split, linears, outputs] float32`."""
    at = (Int64(row) * key.tiling(gemm).split + Int64(rank)) * key.linears(gemm) + Int64(linear)
    return g_parts + (at * key.outputs(gemm) + Int64(channel)) * 4


def add_parts(g_parts: Int64, row: Int32, linear: Any, channel: Int32, gemm: str, key: MoeSmallKey) -> list[Float32]:
    """Everyone's sums of four channels, added in order."""
    parts = [part_address(g_parts, row, rank, linear, channel, gemm, key) for rank in range(key.tiling(gemm).split)]
    return add_in_order([gpu.load_floats(part, 4, bypass_l1=True) for part in parts])


def block_sums(
    g_parts: Int64, s_sums: Int32, slot: Int32, row: Int32, place: Int32, linear: int, channel: Int32, lane: Int32,
    gemm: str, key: MoeSmallKey,
) -> list[Float32]:  # fmt: skip
    """Four channels of a linear for one row of a group, which is in slot `slot`: everyone's sums or one block's."""
    if key.tiling(gemm).split > 1:
        return add_parts(g_parts, slot, linear, channel, gemm, key)
    return load_block_sums(s_sums, row, lane, (place * key.linears(gemm) + linear) * BLOCK_STRIPS, gemm, key)


@cute.jit
def leave_parts(
    g_parts: Int64,
    g_arrivals: Int64,
    s_sums: Int32,
    s_flag: Int32,
    first_slot: Int32,
    rows: Int32,
    first_block: Int32,
    rank: Int32,
    group: Int32,
    thread: Int32,
    gemm: Constexpr,
    key: Constexpr,
):
    """Write this share's sums of a group; whether all others have written theirs, for the whole thread block.

    `g_arrivals` has a counter for each group and block, and `s_flag` is a word for this function.
    """
    lane = thread & 31
    blocks = key.tiling(gemm).blocks
    for task in cutlass.range(
        cute.arch.make_warp_uniform(thread >> 5), rows * blocks, key.threads(gemm) // 32, unroll=1
    ):
        row = task // blocks
        place = task - row * blocks
        channel = (first_block + place) * BLOCK + lane * LANE_CHANNELS
        for linear in cutlass.range_constexpr(key.linears(gemm)):
            sums = load_block_sums(s_sums, row, lane, (place * key.linears(gemm) + linear) * BLOCK_STRIPS, gemm, key)
            gpu.store_floats(part_address(g_parts, first_slot + row, rank, linear, channel, gemm, key), sums)
    cute.arch.sync_threads()
    if thread == 0:
        counter = g_arrivals + Int64(group * (key.outputs(gemm) // BLOCK) + first_block) * 4
        gpu.store_shared_int(s_flag, gpu.add_counter(counter, Int32(1)))
    cute.arch.sync_threads()
    return Int32(gpu.load_shared_int(s_flag) == key.tiling(gemm).split - 1)
