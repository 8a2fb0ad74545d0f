"""Holds the scheduling kernel's binary to its registers; `test_prefill` holds its blocks to the segments."""

from __future__ import annotations

import pytest

from trellis_kernels.cute.prefill_key import PrefillScheduleKey

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.report import report_kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_the_binary_has_no_stack(arch: str) -> None:
    report = report_kernel(PrefillScheduleKey(arch))
    assert report.error is None
    assert report.is_good
    assert report.registers <= 64, "a block of 1,024 threads has 64 registers each"
