"""Owns rows of activations as two signed bytes a channel, and how sums of byte products become rows of the product.

It must not know routing or what a row is for.  A mul1 weight is scale (S + offset) before its last rounding, S being
the byte sum of its hash.  A row's activations are step (256 hi + lo), one step for the whole row, so

    sum over k of weight * activation = scale * step * (sum S (256 hi + lo) + offset * sum (256 hi + lo))

and both sums are of integers.  A row keeps its `law`: scale * step, and offset times the last sum.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.codebooks.mul1 import BIAS_BITS, SCALE_BITS
from trellis_kernels.cute import gemm_primitives as gpu

__all__ = [
    "LAW_BYTES", "apply_law", "apply_step", "high_bytes", "quantise_row", "step_of", "store_law",
    "stored_byte_offset", "weight_offset", "weight_scale",
]  # fmt: skip

LAW_BYTES = 8
"""Of a row: scale, then offset times sum, in fp32."""
_STEPS = 127 * 256 + 127
_CHUNK = 8  # channels that a lane converts at once
_TINIEST = 1e-30  # a step for rows of zeros


def weight_scale() -> float:
    """Value of one unit of the byte sum."""
    return float(np.array(SCALE_BITS, np.uint16).view(np.float16))


def weight_offset() -> float:
    """What is added to the byte sum: the law adds it to 1024 + S."""
    return 1024.0 + float(np.array(BIAS_BITS, np.uint16).view(np.float16)) / weight_scale()


def apply_law(values: list[Float32], law: Int64) -> list[Float32]:
    """Joined sums of byte products to the product."""
    scale, shift = gpu.load_floats(law, 2, bypass_l1=True)
    return [(value + shift) * scale for value in values]


def apply_step(values: list[Float32], step: Float32, total: Int32) -> list[Float32]:
    """The same from a row's step and the sum of its whole activations."""
    scale, shift = step * Float32(weight_scale()), Float32(total) * Float32(weight_offset())
    return [(value + shift) * scale for value in values]


def stored_byte_offset(lane: Int32) -> Int32:
    """Bytes from the start of a block of 128 channels to hi of the first two of a lane's four; the others lie 4 on.

    Channels of each 16 lie in the order of `moe_math.stored_offset`, lo 16 bytes after hi.
    """
    quarter = lane & 3
    return (lane // 4) * 32 + (quarter & 1) * 8 + (quarter // 2) * 2


def step_of(most: Float32) -> Float32:
    """The step of a row whose largest magnitude is known."""
    return gpu.larger(most * Float32(1.0 / _STEPS), Float32(_TINIEST))


def store_law(g_law: Int64, step: Float32, total: Int32) -> None:
    """Write a row's law from its step and the sum of its whole activations."""
    gpu.store_floats(g_law, [step * Float32(weight_scale()), Float32(total) * Float32(weight_offset())])


def high_bytes(whole: list[Int32]) -> list[Int32]:
    """Hi of each activation, so that the rest fits a signed byte; the rest is its low byte as it stands."""
    return [(value + 128) >> 8 for value in whole]


@cute.jit
def quantise_row(g_halves: Int64, g_bytes: Int64, g_law: Int64, channels: Constexpr, lane: Int32):
    """Rewrite one row of fp16 as bytes and its law, by one warp; the order of channels inside 16 stays."""
    most = Float32(0.0)
    for first in cutlass.range(lane * _CHUNK, channels, 32 * _CHUNK, unroll=1):
        for word in gpu.load_fresh_words(g_halves + Int64(first) * 2, 4):
            for value in gpu.floats_from(word, "float16"):
                most = gpu.larger(most, gpu.magnitude(value))
    for mask in (1, 2, 4, 8, 16):
        most = gpu.larger(most, gpu.lane_swap(most, mask))
    step = step_of(most)
    inverse = Float32(1.0) / step
    total = Int32(0)
    for first in cutlass.range(lane * _CHUNK, channels, 32 * _CHUNK, unroll=1):
        words = gpu.load_fresh_words(g_halves + Int64(first) * 2, 4)
        whole = [gpu.round_to_int(value * inverse) for word in words for value in gpu.floats_from(word, "float16")]
        for value in whole:
            total = total + value
        high = high_bytes(whole)
        # 16 channels are 16 bytes of hi and 16 of lo; a lane has half of them
        target = g_bytes + Int64((first // 16) * 32 + first % 16)
        gpu.store_words(target, [gpu.pack_bytes(high[:4]), gpu.pack_bytes(high[4:])])
        gpu.store_words(target + 16, [gpu.pack_bytes(whole[:4]), gpu.pack_bytes(whole[4:])])
    for mask in (1, 2, 4, 8, 16):
        total = total + gpu.swap_int(total, mask)
    if lane == 0:
        store_law(g_law, step, total)
