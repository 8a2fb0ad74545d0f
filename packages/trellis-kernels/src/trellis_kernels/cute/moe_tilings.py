"""Owns the tilings of the few-token layer: measured ones, and a rule for everything else.  It must not know weights.

The measured ones are what `python -m trellis_kernels.bench.tune` found on one H200; `docs/kernels.md` has their times.
Nothing is tuned at a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trellis_format.extent import BLOCK
from trellis_kernels.cute.gemm_share import STEP_CHANNELS
from trellis_kernels.cute.moe_key import Tiling

__all__ = ["Choice", "Shape", "choose"]

_LEAST_STEPS = 3  # of a warp; below, the start and the end of a thread block take longer than its steps


@dataclass(frozen=True)
class Shape:
    """What the choice reads of a layer.

    Args:
        arch: compile target.
        arithmetic: of the products.
        codebook: its name.
        padded_hidden: hidden channels.
        width: intermediate channels of the rank.
        num_experts: experts.
        top_k: routes of a token.
    """

    arch: str
    arithmetic: str
    codebook: str
    padded_hidden: int
    width: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class Choice:
    """Tilings of up and down, and the most products with one decoded weight."""

    up: Tiling
    down: Tiling
    row_columns: int


def _ring(slices: int, resident: int, split: int = 1, blocks: int = 1) -> Tiling:
    return Tiling(blocks=blocks, slices=slices, split=split, stages=3, resident=resident, in_shared=True)


_WIDE = Tiling(blocks=2, slices=1, resident=4)
_SMALL = Tiling(slices=2, resident=4)

_MEASURED: dict[Shape, dict[int, Choice]] = {
    Shape("sm_90a", "bytes", "mul1", 4096, 1408, 128, 8): {
        1: Choice(Tiling(split=3), Tiling(slices=4), 1),
        8: Choice(_ring(2, 3), _ring(2, 5), 1),
        32: Choice(_ring(1, 5), _WIDE, 2),
    },
    Shape("sm_90a", "exact", "mul1", 4096, 1408, 128, 8): {
        8: Choice(Tiling(), _SMALL, 1),
        128: Choice(Tiling(), _ring(2, 5), 2),
    },
    Shape("sm_90a", "bytes", "mul1", 2048, 768, 128, 8): {
        1: Choice(Tiling(split=5), Tiling(slices=4), 1),
        8: Choice(_ring(1, 5, split=3), _SMALL, 2),
        32: Choice(_ring(2, 3), _ring(2, 5), 2),
    },
    Shape("sm_90a", "exact", "mul1", 2048, 768, 128, 8): {
        128: Choice(Tiling(), _ring(2, 5), 2),
    },
    Shape("sm_90a", "exact", "mcg", 2048, 768, 128, 8): {
        1: Choice(Tiling(split=5), Tiling(slices=4), 2),
        8: Choice(_ring(1, 5, split=3), _ring(2, 5), 2),
        32: Choice(_ring(1, 5), _ring(2, 5), 2),
        128: Choice(_ring(2, 3), _ring(2, 5), 2),
    },
    Shape("sm_90a", "exact", "mcg", 7168, 256, 256, 8): {
        1: Choice(Tiling(split=16), Tiling(blocks=2, slices=2), 1),
        8: Choice(_ring(1, 5, split=7), _WIDE, 2),
        32: Choice(Tiling(), _WIDE, 2),
        128: Choice(Tiling(), _WIDE, 2),
    },
}
_RING_ARCHS = ("sm_90a", "sm_100a")  # with 227 KiB for a thread block, which rings of every rate fit
_NEAR = 2.0  # a measurement serves token counts within this factor


def choose(shape: Shape, *, max_tokens: int, multiprocessors: int) -> Choice:
    """The choice for a capacity: of the nearest measured token count where one is near, else by rule.

    Args:
        shape: of the layer.
        max_tokens: most tokens of a launch.
        multiprocessors: of the device.
    """
    measured = _MEASURED.get(shape, {})
    near = min(measured, key=lambda tokens: abs(math.log(tokens / max_tokens)), default=None)
    if near is not None and max(near / max_tokens, max_tokens / near) <= _NEAR:
        return measured[near]
    return _by_rule(shape, max_tokens, multiprocessors)


def _by_rule(shape: Shape, max_tokens: int, multiprocessors: int) -> Choice:
    rows = max_tokens * shape.top_k / shape.num_experts  # of an expert, if all were hit alike
    hit = 1 - (1 - min(shape.top_k / shape.num_experts, 1.0)) ** max_tokens
    units = shape.num_experts * hit * (shape.width / BLOCK)
    columns = 1 if rows <= (1 if shape.arithmetic == "bytes" else 3) else 2
    up_steps, down_steps = shape.padded_hidden // STEP_CHANNELS, shape.width // STEP_CHANNELS
    wave = max(round(2 * multiprocessors / units), 1)  # thread blocks that share a unit, for two on every SM
    split = min(wave, max(up_steps // (2 * _LEAST_STEPS), 1))
    is_narrow = down_steps < 2 * _LEAST_STEPS and shape.padded_hidden // BLOCK % 2 == 0
    if max_tokens < 4 and split > 1:
        # one wave that never fills the device: as many warps as fit on what there is
        is_deep = down_steps >= 4 * _LEAST_STEPS
        down = Tiling(slices=4) if is_deep else Tiling(blocks=2, slices=2) if is_narrow else Tiling()
        return Choice(Tiling(split=split), down, columns)
    if shape.arch not in _RING_ARCHS:
        return Choice(Tiling(split=split), _WIDE if is_narrow else _SMALL, columns)
    down = _WIDE if is_narrow else _ring(2, 5)
    if units < 3 * multiprocessors:
        return Choice(_ring(1, 5, split=min(3 * split, max(up_steps // (2 * _LEAST_STEPS), 1))), down, columns)
    return Choice(Tiling() if rows > 3 or is_narrow else _ring(2, 3), down, columns)
