"""Holds rows of ops to checked outputs of every group."""

from __future__ import annotations

import pytest
import torch

from trellis_kernels.bench.op_cases import GROUPS
from trellis_kernels.bench.timing import Samples
from trellis_moe.bench import ops as module
from trellis_moe.bench.ops import GPU_SIZES, TINY_SIZES, measure_ops
from trellis_moe.bench.record import COPY, Recorder
from trellis_moe.receipts.figures import FIGURES
from trellis_moe.receipts.schema import OpCase
from trellis_moe.receipts.targets import OpRate, OpSlowdown, OpTime

CPU = torch.device("cpu")


def make_recorder() -> Recorder:
    recorder = Recorder(CPU, seconds=60.0, samples=5, tell=lambda line: None)
    recorder.add_ceiling(COPY, "bytes", 1000, Samples((1000,) * 5))
    return recorder


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_checked_rows(group: str) -> None:
    recorder = make_recorder()
    measure_ops(recorder, group, TINY_SIZES)
    assert recorder.rows
    assert all(row.check.error <= row.check.bound and row.ratios for row in recorder.rows)
    assert all(isinstance(row.case, OpCase) for row in recorder.rows)


def test_a_wrong_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trellis_kernels.bench.ops import OpRow

    wrong = OpRow("decode", "mul1 K=4", Samples((1,) * 5), 5, 5, error=0.25, bound=0.0)
    monkeypatch.setattr(module, "measure", lambda *_, **__: wrong)
    with pytest.raises(ValueError, match="above its bound"):
        measure_ops(make_recorder(), "decode", TINY_SIZES)


def test_the_sizes_of_a_gpu_have_every_op_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, rows = GPU_SIZES.hidden, GPU_SIZES.rows[-1]
    names = {f"{book} K={k} float16" for book in ("3inst", "mcg", "mul1") for k in GPU_SIZES.rates}
    names |= {f"{rows} x {hidden} {dtype} H{block}" for dtype in ("float16", "bfloat16") for block in (128, 512)}
    names |= {f"{rows} x {hidden} float32"}
    for tokens, top_k, experts, block_rows in GPU_SIZES.packs:
        case = f"{tokens * top_k} routes, {experts} experts, blocks of {block_rows}"
        names |= {f"{case}, stable", f"{case}, unordered"}
    asked = [figure.target for figure in FIGURES if isinstance(figure.target, OpRate | OpTime | OpSlowdown)]
    assert {target.case for target in asked} <= names
    assert {target.other for target in asked if isinstance(target, OpSlowdown)} <= names
