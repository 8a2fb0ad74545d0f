"""Owns the tilings of the few-token layer: measured ones, and a rule for everything else.  It must not know weights.

The measured ones are what one H200 took least time for, without those that spill; `docs/kernels.md` has times.  Nothing
is tuned at a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trellis_format.codebooks import EXL3_CODEBOOKS
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
    """Tilings of up and down, the most products with one decoded weight, and whether routes are not grouped."""

    up: Tiling
    down: Tiling
    row_columns: int = 1
    direct: bool = False


def _ring(slices: int = 2, *, split: int = 1, blocks: int = 1, stages: int = 3, most: int = 0) -> Tiling:
    return Tiling(blocks=blocks, slices=slices, split=split, stages=stages, resident=1, in_shared=True, most=most)


def _bound(slices: int, resident: int, *, split: int = 1) -> Tiling:
    """Two steps in shared memory and a bound on registers, where more warps gain more than deeper prefetches."""
    return Tiling(slices=slices, split=split, stages=2, resident=resident, in_shared=True)


def _free(slices: int = 2, *, split: int = 1, blocks: int = 1, most: int = 0) -> Tiling:
    """Steps in registers, as many of them as the compiler likes: a bound on registers makes it use and spill them."""
    return Tiling(blocks=blocks, slices=slices, split=split, resident=1, most=most)


_MEASURED: dict[Shape, dict[int, Choice]] = {
    Shape("sm_90a", "bytes", "mul1", 4096, 1408, 128, 8): {
        1: Choice(_ring(split=3, most=2), _ring(4, blocks=2), direct=True),
        8: Choice(_bound(2, 3), _bound(2, 6)),
        32: Choice(_bound(1, 5), _bound(2, 5)),
    },
    Shape("sm_90a", "exact", "mul1", 4096, 1408, 128, 8): {
        1: Choice(_ring(split=3), _ring(4, blocks=2), direct=True),
        8: Choice(_ring(), _ring()),
        32: Choice(_ring(), _ring()),
        128: Choice(_ring(1, stages=2), _ring(1, stages=2), 2),
    },
    Shape("sm_90a", "unrounded", "mul1", 4096, 1408, 128, 8): {
        1: Choice(_ring(split=3), _ring(4, blocks=2), direct=True),
        8: Choice(_ring(), _ring()),
        32: Choice(_ring(), _ring()),
        128: Choice(_ring(1), _ring(), 2),
    },
    Shape("sm_90a", "bytes", "mul1", 2048, 768, 128, 8): {
        1: Choice(_free(1, split=8, most=3), _free(4), direct=True),
        8: Choice(_free(1, split=3), _free()),
        32: Choice(_bound(2, 3), _bound(2, 6)),
    },
    Shape("sm_90a", "exact", "mul1", 2048, 768, 128, 8): {
        1: Choice(_free(split=5), _free(4), direct=True),
        8: Choice(_ring(split=2), _ring()),
        32: Choice(_ring(), _ring()),
        128: Choice(_ring(1, stages=2), _ring(1, stages=2), 2),
    },
    Shape("sm_90a", "unrounded", "mul1", 2048, 768, 128, 8): {
        1: Choice(_free(split=5, most=2), _free(4, most=1), direct=True),
        8: Choice(_ring(1, split=3), _ring()),
        32: Choice(_ring(), _ring()),
        128: Choice(_ring(1), _ring(), 2),
    },
    Shape("sm_90a", "exact", "mcg", 2048, 768, 128, 8): {
        1: Choice(_free(1, split=8, most=3), _ring(4, most=1), direct=True),
        8: Choice(_free(1, split=3), _free()),
        32: Choice(_ring(), _ring()),
        128: Choice(_bound(1, 5), _bound(2, 5), 2),
    },
    Shape("sm_90a", "exact", "mcg", 7168, 256, 256, 8): {
        1: Choice(_ring(4, split=8, most=1), _ring(1, blocks=4, most=1), direct=True),
        8: Choice(_ring(split=7), _ring()),
        32: Choice(_ring(), _ring(1, blocks=2)),
        128: Choice(_ring(), _ring(1, blocks=2)),
    },
}
_RING_ARCHS = ("sm_90a", "sm_100a")  # with 227 KiB for a thread block, which rings of every rate fit
_NEAR = 2.0  # a measurement serves token counts within this factor
_MOST_DIRECT = 2  # tokens whose routes share too few experts for groups to pay
_COLUMN_ROWS = {"exact": 4.0, "unrounded": 4.0, "bytes": 2.0}
"""Rows of an average expert above which two products share a decoded weight."""


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
    up_steps, down_steps = shape.padded_hidden // STEP_CHANNELS, shape.width // STEP_CHANNELS
    most_split = max(up_steps // (2 * _LEAST_STEPS), 1)
    has_rings = shape.arch in _RING_ARCHS
    is_narrow = down_steps < 2 * _LEAST_STEPS and shape.padded_hidden // BLOCK % 2 == 0
    if max_tokens <= _MOST_DIRECT:
        # one wave of two thread blocks an SM for gate and up, as many warps as there is work for down
        split = min(max(round(2 * multiprocessors / units), 1), most_split, shape.padded_hidden // BLOCK)
        slices = max(min(down_steps // _LEAST_STEPS, 4), 1)
        up, down = (_ring(split=split), _ring(slices)) if has_rings else (_free(split=split), _free(slices))
        return Choice(up, down, direct=True)
    columns = 1 if rows <= _COLUMN_ROWS[shape.arithmetic] else 2
    wave = max(round(2 * multiprocessors / units), 1)  # thread blocks that share a unit, for two on every SM
    if not has_rings:
        return Choice(_free(split=min(wave, most_split)), _free(1, blocks=2) if is_narrow else _free(), columns)
    if shape.codebook not in EXL3_CODEBOOKS:
        # with a table, whose decoding takes registers, smaller thread blocks are compiled to spill
        return Choice(_ring(split=min(wave, most_split)), _ring(2 if is_narrow else 4, blocks=2 if is_narrow else 1))
    down = _ring(1, blocks=2) if is_narrow else _ring()
    if units < 3 * multiprocessors:
        return Choice(_free(1, split=min(3 * wave, most_split)), down if is_narrow else _free(), columns)
    return Choice(_ring(), down, columns)
