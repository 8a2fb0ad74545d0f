"""Owns what lies between the GEMMs for one block of 128 channels of one row: output rotation to input rotation.

It must not know where the sums come from or which launch it is part of.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_math
from trellis_kernels.cute.moe_arguments import MoeArguments
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_math import LANE_CHANNELS

__all__ = ["join_block", "load_vectors", "store_block"]


def load_vectors(args: MoeArguments, expert: Int32, block: Int32, lane: Int32, key: MoeSmallKey) -> list[list[Float32]]:
    """This lane's four channels of gate's and up's svh and of down's suh; every load before any use."""
    channel = block * BLOCK + lane * LANE_CHANNELS
    row = Int64(expert) * (key.projections + 1)
    return [
        moe_math.load_scales(args.middle_scales, (row + index) * key.width + Int64(channel))
        for index in range(key.projections + 1)
    ]


def join_block(
    args: MoeArguments,
    sums: list[list[Float32]],
    vectors: list[list[Float32]],
    expert: Int32,
    block: Int32,
    lane: Int32,
    key: MoeSmallKey,
) -> list[Float32]:
    """From products in the rotated basis, one list for each projection, to the rotated input of down."""
    signs = moe_math.hadamard_signs(lane)
    channel = block * BLOCK + lane * LANE_CHANNELS
    branches = [
        [a * b for a, b in zip(moe_math.hadamard(values, signs), svh, strict=True)]
        for values, svh in zip(sums, vectors, strict=False)
    ]
    for projection, bias in enumerate((args.gate_bias, args.up_bias)[2 - key.projections :]):
        if key.biased[projection + 2 - key.projections]:
            addend = moe_math.load_scales(bias, Int64(expert) * key.width + Int64(channel))
            branches[projection] = [a + b for a, b in zip(branches[projection], addend, strict=True)]
    joined = moe_math.activate(branches[0] if key.gated else None, branches[-1], key.activation)
    return moe_math.hadamard([a * b for a, b in zip(joined, vectors[-1], strict=True)], signs)


def store_block(row: Int64, block: Int32, lane: Int32, values: list[Float32]) -> None:
    """Write a block of a row in fp16, in the order that the GEMM reads."""
    first = row + Int64(block * (2 * BLOCK)) + Int64(moe_math.stored_offset(lane))
    for index, word in enumerate(moe_math.stored_words(values)):
        gpu.store_words(first + 8 * index, [word])
