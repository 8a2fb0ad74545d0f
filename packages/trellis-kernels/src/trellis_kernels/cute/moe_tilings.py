"""Owns the tilings of the few-token layer: a rule over a layer's numbers.  It must not know weights or `cutlass`.

The rule was fitted to `python -m trellis_kernels.bench.tune` on one H200; `docs/kernels.md` has the measurements.
"""

from __future__ import annotations

from trellis_format.extent import BLOCK

from trellis_kernels.cute.gemm_share import STEP_CHANNELS
from trellis_kernels.cute.moe_key import Tiling

__all__ = ["choose_columns", "choose_tilings"]

_LEAST_STEPS = 3  # of a warp; below, the start and the end of a thread block take longer than its steps


def choose_columns(arithmetic: str, rows: float) -> int:
    """Products with one decoded weight, from the mean rows of an expert if all were hit alike."""
    if arithmetic == "bytes":
        return 1 if rows <= 1 else 2
    return 1 if rows <= 3 else 2


def choose_tilings(
    *, padded_hidden: int, width: int, units: float, rows: float, multiprocessors: int
) -> tuple[Tiling, Tiling]:
    """Tilings of up and down.

    Args:
        padded_hidden: hidden channels.
        width: intermediate channels.
        units: experts that a launch is expected to read, times 128-channel blocks of `width`.
        rows: mean rows of an expert if all were hit alike.
        multiprocessors: of the device.
    """
    split = min(
        max(round(2 * multiprocessors / units), 1), max(padded_hidden // STEP_CHANNELS // (2 * _LEAST_STEPS), 1)
    )
    even = padded_hidden // BLOCK % 2 == 0
    if split > 1 and units < multiprocessors:
        # too few blocks to fill the device: one wave, as many warps as fit
        down = (
            Tiling(slices=4) if width // STEP_CHANNELS >= 4 * _LEAST_STEPS or not even else Tiling(blocks=2, slices=2)
        )
        return Tiling(split=split), down
    if width // STEP_CHANNELS < 2 * _LEAST_STEPS and even:
        return Tiling(split=split), Tiling(blocks=2, slices=1, resident=4)
    down = Tiling(slices=2, stages=3, resident=5, in_shared=True)
    if rows > 3:
        return Tiling(), down
    return Tiling(slices=1, split=split, stages=3, resident=5, in_shared=True), down
