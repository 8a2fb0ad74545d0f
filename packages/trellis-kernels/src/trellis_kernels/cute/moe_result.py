"""Owns the end of a layer: a route's weighted row of down, and the sum of a token's rows in the order of its slots.

It must not know where the sums come from or which launch it is part of.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_math
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.moe_arguments import MoeArguments
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS

__all__ = ["arrive", "fetch_output_scales", "load_output_scales", "store_out", "store_weighted", "sum_token"]


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _scale_place(expert: Int32, channel: Int32, key: MoeSmallKey) -> Int64:
    return (Int64(0) if key.shared_outputs else Int64(expert) * key.padded_hidden) + Int64(channel)


def fetch_output_scales(args: MoeArguments, expert: Int32, first_block: Int32, lane: Int32, key: MoeSmallKey) -> None:
    """Bring svh of a thread block's channels into the L2; by one warp."""
    first = _scale_place(expert, first_block * BLOCK, key)
    moe_math.fetch_scales(args.output_scales, first, key.down.blocks * BLOCK, lane)


def load_output_scales(args: MoeArguments, expert: Int32, channel: Int32, key: MoeSmallKey) -> list[Float32]:
    """Four channels of svh of down."""
    return moe_math.load_scales(args.output_scales, _scale_place(expert, channel, key))


def _result_address(results: Int64, route: Int32, channel: Int32, key: MoeSmallKey) -> Int64:
    return results + (Int64(route) * key.padded_hidden + Int64(channel)) * 4


def store_weighted(
    args: MoeArguments, results: Int64, sums: list[Float32], svh: list[Float32], weight: Float32, expert: Int32,
    route: Int32, channel: Int32, lane: Int32, key: MoeSmallKey,
) -> None:  # fmt: skip
    """From products in the rotated basis to the weighted row of a route, for one block."""
    values = [a * b for a, b in zip(moe_math.hadamard(sums, moe_math.hadamard_signs(lane)), svh, strict=True)]
    if key.biased[2]:
        addend = moe_math.load_scales(args.down_bias, Int64(expert) * key.padded_hidden + Int64(channel))
        values = [a + b for a, b in zip(values, addend, strict=True)]
    gpu.store_floats(_result_address(results, route, channel, key), [value * weight for value in values])


def arrive(arrivals: Int64, token: Int32, block: Int32, live: Uint32, s_flag: Int32, key: MoeSmallKey) -> None:
    """Count a row of a token's block, and note in a shared word whether it was the last one."""
    counter = arrivals + Int64(token * (key.padded_hidden // BLOCK) + block) * 4
    gpu.store_shared_int(s_flag, Int32(gpu.add_counter(counter, Int32(1)) == gpu.count_bits(live) - 1))


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
