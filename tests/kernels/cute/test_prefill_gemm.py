"""Holds the binaries of the many-row GEMM to their registers: no loop spills, at any epilogue."""

from __future__ import annotations

import pytest

from trellis_format.activations import ACTIVATIONS, Activation
from trellis_kernels.cute.prefill_key import SHARED_LIMIT, PrefillGemmKey

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.report import report_kernel

KEYS = [
    *(PrefillGemmKey("sm_90a", codebook, (6,), "rows") for codebook in ("mul1", "mcg", "3inst")),
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
]


def most_stack(key: PrefillGemmKey) -> int:
    """Bytes of stack that a key may have: none, but where gate and up meet with biases a few registers of a tile's end.

    There the values of both and the sums of the rows that follow take all registers; the loop over steps never spills.
    """
    return 96 if key.gated and any(key.biased) else 0


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_binary_has_no_stack_and_fits(key: PrefillGemmKey) -> None:
    report = report_kernel(key)
    assert report.error is None, report.error
    assert report.stack_bytes <= most_stack(key)
    assert report.registers <= 168, "three warpgroups start with 168 registers a thread, and then hand some over"
    assert report.shared_bytes <= SHARED_LIMIT + 1024


def test_registers_handed_over_are_those_that_the_block_has() -> None:
    from trellis_kernels.cute import prefill_gemm

    consumers = 32 * prefill_gemm.CONSUMER_WARPS * prefill_gemm._CONSUMER_REGISTERS
    feeders = 32 * prefill_gemm.FEEDER_WARPS * prefill_gemm._FEEDER_REGISTERS
    assert consumers + feeders <= 168 * prefill_gemm._THREADS, "a warpgroup would wait for registers for ever"
