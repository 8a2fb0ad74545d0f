"""Owns every figure that was asked for, as one list.  It must not know how a figure is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trellis_moe.receipts.schema import Receipt
from trellis_moe.receipts.targets import (
    CeilingRate,
    EagerCost,
    FinalBytes,
    Found,
    LayerTime,
    NoCliff,
    NoSlower,
    OpRate,
    OpSlowdown,
    OpTime,
    Scratch,
    Speedup,
    StagingPeak,
    StagingRate,
    Target,
)

__all__ = ["FIGURES", "KIMI_LAYERS", "LAYER_1GB", "MODEL_40GB", "UNQUANTISED", "Figure", "Verdict", "judge"]

MIB = 1 << 20
LAYER_1GB = "1 GB layer"
"""Name of the layer whose preparation is measured."""
MODEL_40GB = "40 GB model"
"""Name of the model whose preparation is measured: the 1 GB layer, forty times."""
KIMI_LAYERS = {
    "Kimi-K3 layer at TP9, 384 channels, K=2": 924_844_032,
    "Kimi-K3 layer at TP9, 256 channels, K=2": 616_562_688,
}
"""Bytes of codes of a Kimi-K3 layer of 896 experts, for a rank with 12 and for one with 8 slots of 32 channels."""

UNQUANTISED = "bf16 grouped GEMM"
"""Name of the contender that multiplies bf16 weights which nobody had to decode."""

_GLM = ("GLM-4.5-Air", "mul1", "3")
_QWEN = ("Qwen3-30B-A3B", "mul1", "3")
_QWEN4 = ("Qwen3-30B-A3B", "mcg", "4")
_DSV3 = ("DeepSeek-V3 TP8", "mcg", "3")
_KIMI = ("Kimi-K3 TP9", "mcg", "2")
_PACKED = "65536 routes, 896 experts, blocks of 64"


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        group: the table that it is in.
        target: what was asked for.
    """

    group: str
    target: Target


@dataclass(frozen=True)
class Verdict:
    """A figure and what receipts say of it.

    Attributes:
        figure: which.
        found: None where no receipt has it.
    """

    figure: Figure
    found: Found | None

    @property
    def word(self) -> str:
        """`met`, `not met` or `not measured`."""
        if self.found is None:
            return "not measured"
        return "met" if self.found.met else "not met"


def judge(figures: Iterable[Figure], receipts: Iterable[Receipt]) -> tuple[Verdict, ...]:
    """What receipts say of each figure.

    Args:
        figures: what was asked for.
        receipts: oldest first; where two have the same, the last one counts.
    """
    kept = tuple(receipts)
    return tuple(Verdict(figure, figure.target.found(kept)) for figure in figures)


def _times(group: str, layer: tuple[str, str, str], milliseconds: dict[int, float]) -> tuple[Figure, ...]:
    return tuple(Figure(group, LayerTime(*layer, tokens, most)) for tokens, most in milliseconds.items())


def _layers() -> tuple[Figure, ...]:
    few, many = "few tokens", "many tokens"
    return (
        *_times(few, _GLM, {1: 0.035, 8: 0.155, 16: 0.25, 32: 0.35, 128: 0.45}),
        *_times(few, _QWEN, {1: 0.016, 8: 0.060, 32: 0.12, 128: 0.16}),
        *_times(few, _QWEN4, {1: 0.018, 8: 0.065, 32: 0.14, 128: 0.17}),
        *_times(few, _DSV3, {1: 0.022, 8: 0.090, 32: 0.26, 128: 0.40}),
        *(Figure(few, EagerCost(*layer, 8, 10.0)) for layer in (_GLM, _QWEN, _QWEN4, _DSV3)),
        *_times(many, _GLM, {512: 0.80, 1024: 1.1, 4096: 2.8, 8192: 4.9, 16384: 8.8}),
        *_times(many, _QWEN, {512: 0.28, 1024: 0.38, 4096: 0.86, 8192: 1.47}),
        *_times(many, _QWEN4, {1024: 0.40, 8192: 1.47}),
        *_times(many, _DSV3, {1024: 0.95, 8192: 2.3}),
        *(
            Figure(many, NoSlower(*layer, tokens, UNQUANTISED))
            for layer, counts in (
                (_GLM, (128, 512, 1024, 4096, 8192, 16384)),
                (_QWEN, (128, 512, 1024, 4096, 8192)),
                (_DSV3, (128, 1024, 8192)),
            )
            for tokens in counts
        ),
        *(Figure(many, NoCliff(*layer, 0.05)) for layer in (_GLM, _QWEN)),
        Figure(many, Scratch(*_KIMI, 4096, 320 * MIB)),
    )


def _ops() -> tuple[Figure, ...]:
    asked = {"2": 7e12, "3": 6.5e12, "4": 7e12}
    books = {"3inst": [], "mcg": [], "mul1": ["1.5", "2.5", "3.5"]}
    rotated = ("rotate_input", ("float16 H128", "bfloat16 H128", "float16 H512", "bfloat16 H512"))
    return (
        *(Figure("ops", OpRate("decode", f"{book} K=4 float16", 0.70)) for book in books),
        *(Figure("ops", OpRate(rotated[0], f"4096 x 7168 {case}", 0.75)) for case in rotated[1]),
        Figure("ops", OpRate("rotate_output", "4096 x 7168 float32", 0.75)),
        Figure("ops", OpTime("pack_routes", f"{_PACKED}, stable", 40.0)),
        Figure("ops", OpTime("pack_routes", "128 routes, 128 experts, blocks of 16, stable", 6.0)),
        Figure("ops", OpSlowdown("pack_routes", f"{_PACKED}, stable", f"{_PACKED}, unordered", 1.3)),
        *(
            Figure("decode", CeilingRate(f"decode {book} K={rate} from registers", asked.get(rate, 0.0)))
            for book, halves in books.items()
            for rate in [*map(str, range(1, 9)), *halves]
        ),
    )


def _preparation() -> tuple[Figure, ...]:
    group, small, large = "preparation", 16 * MIB, 64 * MIB
    return (
        Figure(group, StagingRate(LAYER_1GB, large, 0.80)),
        Figure(group, StagingRate(LAYER_1GB, small, 0.60)),
        *(
            Figure(group, StagingPeak(layer, bound, place, above))
            for layer, bounds in ((LAYER_1GB, (large, small)), (MODEL_40GB, (large,)))
            for bound in bounds
            for place, above in (("device", MIB), ("host", 32 * MIB))
        ),
        *(Figure(group, FinalBytes(layer, nbytes)) for layer, nbytes in KIMI_LAYERS.items()),
    )


def _ranks() -> tuple[Figure, ...]:
    whole = (_GLM, ("DeepSeek-V3", "mcg", "3"))
    return tuple(
        Figure("ranks", Speedup(*layer, "tp", 2, tokens, factor))
        for layer in whole
        for tokens, factor in ((8, 1.3), (8192, 1.8))
    )


FIGURES: tuple[Figure, ...] = (*_layers(), *_ops(), *_preparation(), *_ranks())
"""Every figure that was asked for, in the order of the tables."""
