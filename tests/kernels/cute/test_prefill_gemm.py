"""Holds the binaries of the many-row GEMM to their registers: no loop spills, at any epilogue.

Registered keys are held to theirs by the table of costs; these are of other rates, laws and biases.
"""

from __future__ import annotations

import pytest

from trellis_format.activations import ACTIVATIONS, Activation
from trellis_kernels.cute.prefill_key import (
    HALF_SHARED_LIMIT,
    SHARED_LIMIT,
    PrefillGemmKey,
    PrefillMiddleKey,
    PrefillShortKey,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.report import report_kernel

_SHORT = (PrefillShortKey, PrefillMiddleKey)
KEYS = [
    PrefillGemmKey("sm_90a", "mul1", (3,), "rows"),
    PrefillGemmKey("sm_90a", "3inst", (8,), "add", biased=(True,), out_dtype="bfloat16", weight_dtype="bfloat16"),
    PrefillGemmKey("sm_90a", "mcg", (16,), "down", biased=(True,), out_dtype="float16"),
    *(
        PrefillGemmKey("sm_90a", "mul1", (6, 6), "join", Activation(kind), biased=(True, True))
        for kind in ACTIVATIONS
        if Activation(kind).gated
    ),
    PrefillGemmKey("sm_90a", "mul1", (6,), "join", Activation("relu2"), biased=(True,)),
    PrefillGemmKey("sm_90a", "mul1", (6, 8), "join", Activation("silu"), biased=(True, False)),
    *(kind("sm_90a", "mul1", (5, 16), "join", Activation("situ"), biased=(True, True)) for kind in _SHORT),
    PrefillShortKey("sm_90a", "3inst", (8,), "down", biased=(True,), out_dtype="float16"),
    PrefillMiddleKey("sm_90a", "mcg", (6,), "add", out_dtype="bfloat16", weight_dtype="float32"),
    PrefillShortKey("sm_90a", "lut_fp16", (10, 12), "join", Activation("silu"), biased=(False, False)),
]


def most_stack(key: PrefillGemmKey) -> int:
    """Bytes of stack that a key may have: none, but where gate and up meet with biases six registers of a tile's end.

    There the values of both and the sums of the rows that follow take all registers; the loop over steps never spills.
    """
    return 24 if key.gated and any(key.biased) else 0


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_binary_has_no_stack_and_fits(key: PrefillGemmKey) -> None:
    report = report_kernel(key)
    assert report.error is None, report.error
    assert report.stack_bytes <= most_stack(key)
    assert report.registers <= 504 // (3 * key.resident), "what a scheduler's warps start with, before some hand over"
    assert report.shared_bytes <= (SHARED_LIMIT if key.resident == 1 else HALF_SHARED_LIMIT) + 1024


@pytest.mark.parametrize(("kind", "start"), [(PrefillGemmKey, 168), (PrefillShortKey, 80), (PrefillMiddleKey, 80)])
def test_registers_handed_over_are_those_that_the_block_has(kind: type[PrefillGemmKey], start: int) -> None:
    from trellis_kernels.cute import prefill_gemm

    assert kind.resident * prefill_gemm._THREADS * start <= 1 << 16
    multiplying, feeding = kind.registers
    taken = 32 * (prefill_gemm.CONSUMER_WARPS * multiplying + prefill_gemm.FEEDER_WARPS * feeding)
    assert taken <= start * prefill_gemm._THREADS, "a warpgroup would wait for registers for ever"
