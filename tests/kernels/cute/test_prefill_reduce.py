"""Holds the reduction's binary to its registers; `test_prefill` holds its sums to float64."""

from __future__ import annotations

import pytest

from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.prefill_key import PrefillReduceKey

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.report import report_kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("weights", VALUE_BYTES)
@pytest.mark.parametrize("out", VALUE_BYTES)
def test_the_binary_has_no_stack(arch: str, weights: str, out: str) -> None:
    report = report_kernel(PrefillReduceKey(arch, weights, out))
    assert report.error is None
    assert report.is_good
