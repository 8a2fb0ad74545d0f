"""Holds the binaries of the few-row kernels of a linear to their registers: none spills."""

from __future__ import annotations

import pytest

from trellis_kernels.cute.linear_key import LinearKey

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.report import report_kernel


@pytest.mark.parametrize(
    ("codebook", "half_bits", "share_blocks", "registers"),
    [("mul1", 5, 32, 128), ("mcg", 8, 8, 128), ("mcg", 16, 2, 240)],
)
def test_no_binary_spills(codebook: str, half_bits: int, share_blocks: int, registers: int) -> None:
    key = LinearKey("sm_90a", codebook, half_bits, 4096, "bfloat16", "float16", True, share_blocks)
    report = report_kernel(key)
    assert report.error is None, report.error
    assert report.stack_bytes == 0
    assert report.registers <= registers, "up to K = 4 two thread blocks of 256 threads share a multiprocessor"
