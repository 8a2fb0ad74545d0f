"""Owns the register arithmetic between the GEMMs: Hadamard blocks, scales, activations.  It must not know routing.

A warp holds a block of 128 channels of one row, lane L the channels 4L to 4L + 3.  Everything is fp32.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64

from trellis_format.activations import SITU_GATE_LIMIT, SITU_UP_LIMIT, Activation
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute import gemm_primitives as gpu

__all__ = [
    "LANE_CHANNELS",
    "activate",
    "fetch_scales",
    "hadamard",
    "hadamard_signs",
    "load_scales",
    "stored_offset",
    "stored_words",
]

LANE_CHANNELS = 4
"""Channels of a block that a lane holds."""
_LINE_BYTES = 128  # of the L2
_LANE_MASKS = (1, 2, 4, 8, 16)
_NORM = 1.0 / math.sqrt(HADAMARD_BLOCK)
_LOG2_E = 1.0 / math.log(2.0)


def hadamard_signs(lane: Int32) -> list[Float32]:
    """For each butterfly across lanes, +1 in the lane that adds and -1 in the one that subtracts."""
    return [Float32(1 - 2 * ((lane // mask) & 1)) for mask in _LANE_MASKS]


def hadamard(values: list[Float32], signs: list[Float32]) -> list[Float32]:
    """The normalised rotation of one block, butterflies from the nearest channels to the farthest."""
    a, b, c, d = values
    a, b, c, d = a + b, a - b, c + d, c - d
    values = [a + c, b + d, a - c, b - d]
    for mask, sign in zip(_LANE_MASKS, signs, strict=True):
        values = [gpu.fma(value, sign, gpu.lane_swap(value, mask)) for value in values]
    return [value * Float32(_NORM) for value in values]


def load_scales(table: Int64, element: Any) -> list[Float32]:
    """Four fp16 values of a table, `element` being the index of the first, a multiple of four."""
    words = gpu.load_words(table + Int64(element) * 2, 2)
    return [value for word in words for value in gpu.floats_from(word, "float16")]


def fetch_scales(table: Int64, element: Any, channels: int, lane: Int32) -> None:
    """Bring a run of fp16 values into the L2, so that `load_scales` finds them there; by one warp."""
    lines = -(-channels * 2 // _LINE_BYTES)
    gpu.fetch_to_l2(table + Int64(element) * 2 + Int64(cutlass.min(lane, lines - 1) * _LINE_BYTES))


def stored_words(values: list[Float32]) -> list[Any]:
    """Four values to two fp16 words, which lie 8 bytes apart in the order that the GEMM reads; see `stored_offset`."""
    return [gpu.pack_halves(values[0], values[1]), gpu.pack_halves(values[2], values[3])]


def stored_offset(lane: Int32) -> Int32:
    """Bytes from the start of a block of fp16 channels to the first of this lane's two words.

    Channels of each 16 lie in the order 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
    """
    quarter = lane & 3
    return (lane // 4) * 32 + (quarter & 1) * 16 + (quarter // 2) * 4


def sigmoid(value: Float32) -> Float32:
    """1 / (1 + exp(-value))."""
    return gpu.reciprocal(gpu.exp2(value * Float32(-_LOG2_E)) + Float32(1.0))


def tanh(value: Float32) -> Float32:
    """1 - 2 / (exp(2 value) + 1), within 2e-7 of tanh."""
    return gpu.fma(gpu.reciprocal(gpu.exp2(value * Float32(2 * _LOG2_E)) + Float32(1.0)), Float32(-2.0), Float32(1.0))


def activate(gate: list[Float32] | None, up: list[Float32], law: Activation) -> list[Float32]:
    """Join gate and up by the law."""
    if gate is None:
        positive = [_at_least(value, 0.0) for value in up]
        return [value * value for value in positive]
    return [_join(g, u, law) for g, u in zip(gate, up, strict=True)]


def _join(g: Float32, u: Float32, law: Activation) -> Float32:
    if law.kind == "situ":
        soft_gate = tanh(g * Float32(1 / SITU_GATE_LIMIT)) * Float32(SITU_GATE_LIMIT)
        return soft_gate * sigmoid(g) * (tanh(u * Float32(1 / SITU_UP_LIMIT)) * Float32(SITU_UP_LIMIT))
    if not math.isinf(law.limit):
        g = _at_most(g, law.limit)
        u = _at_least(_at_most(u, law.limit), -law.limit)
    if law.kind == "gelu_tanh":
        slope = Float32(2 * math.sqrt(2 / math.pi))  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        inner = gpu.fma(g * g * g, Float32(0.044715), g)
        return g * sigmoid(inner * slope) * u
    if law.kind == "swigluoai":
        return g * sigmoid(g * Float32(law.alpha)) * (u + Float32(law.beta))
    return g * sigmoid(g) * u


def _at_most(value: Float32, limit: float) -> Float32:
    return gpu.clamp_above(value, limit)


def _at_least(value: Float32, limit: float) -> Float32:
    return gpu.clamp_below(value, limit)
