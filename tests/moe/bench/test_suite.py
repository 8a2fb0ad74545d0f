"""Holds a run to its order, its parts, and to compiling what it will launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trellis_kernels.layers import DeviceLimits
from trellis_moe.bench import suite as module
from trellis_moe.bench.layers import plan_layer
from trellis_moe.bench.presets import TINY
from trellis_moe.bench.record import COPY, GEMM, Recorder
from trellis_moe.bench.suite import PARTS, LayerRun, Suite, asked_suite, full_suite, run, suite_keys, tiny_suite
from trellis_moe.receipts.schema import LayerCase, OpCase, PrepareCase

CPU = torch.device("cpu")


def measured(suite: Suite, parts: tuple[str, ...] = PARTS, seconds: float = 600.0) -> Recorder:
    recorder = Recorder(CPU, seconds=seconds, samples=5, tell=lambda line: None)
    run(recorder, suite, parts)
    return recorder


def test_the_rehearsal_has_every_kind_of_row() -> None:
    small = replace(tiny_suite(), layers=(LayerRun(TINY, (1,), (2,)),))
    recorder = measured(small)
    assert recorder._skipped == []
    assert set(recorder._ceilings) >= {COPY, GEMM}
    assert {type(row.case) for row in recorder.rows} == {LayerCase, OpCase, PrepareCase}
    contenders = {row.case.contender for row in recorder.rows if isinstance(row.case, LayerCase)}
    assert len(contenders) == 4


@pytest.mark.parametrize(("part", "kind"), [("layer", LayerCase), ("op", OpCase), ("prepare", PrepareCase)])
def test_a_part_alone_measures_nothing_else(part: str, kind: type) -> None:
    small = replace(tiny_suite(), layers=(LayerRun(TINY, (1,), (2,)),), groups=("rotate",))
    recorder = measured(small, (part,))
    assert {type(row.case) for row in recorder.rows} == {kind}
    assert set(recorder._ceilings) >= {COPY, GEMM}


def test_what_there_is_no_time_for_is_named() -> None:
    recorder = measured(tiny_suite(), seconds=-1.0)
    assert recorder.rows == ()
    skipped = {each.what for each in recorder._skipped}
    assert {"device copy", "ops: decode", "prepare tiny layer", "tiny:mul1:3 on the CPU"} <= skipped
    assert all("over" in each.why for each in recorder._skipped)


def test_a_refused_layer_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(module.LayerBench, "measure", refuse)
    recorder = measured(replace(tiny_suite(), layers=(LayerRun(TINY, (1,)),), groups=("rotate",)), ("layer", "op"))
    assert [each.why for each in recorder._skipped] == ["ValueError: refused"]
    assert recorder.rows


def test_every_kernel_of_a_layer_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    limits = DeviceLimits("sm_90a", 132)

    def plan(*args: object, **options: object):
        monkeypatch.setattr("trellis_moe.plan.device_limits", lambda device: limits)
        return plan_layer(*args, **(options | {"device": torch.device("cuda")}))  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(module, "plan_layer", plan)
    suite = Suite(decoded=(("mul1", "3"),), layers=(LayerRun(TINY, (2,), (3,), (1,)),), groups=("pack",))
    keys = suite_keys(suite, frozenset(PARTS), "sm_90a", torch.device("cuda"))
    kinds = {key.kernel for key in keys}
    assert {"decode", "pack_routes", "ceiling"} <= kinds
    assert any("moe" in kind for kind in kinds)
    planned = {key for tokens in (2, 3) for key in plan(TINY, tokens).compile_keys()}
    assert planned <= set(keys)


def test_the_full_suite_begins_with_what_is_asked() -> None:
    suite, asked = full_suite(), asked_suite()
    assert suite.layers[: len(asked.layers)] == asked.layers
    assert {layer.preset.name for layer in suite.layers[:4]} == {"GLM-4.5-Air", "Qwen3-30B-A3B", "DeepSeek-V3 TP8"}
    assert {layer.preset.name for layer in suite.layers} >= {"Kimi-K3 TP9", "Mixtral-8x7B", "DeepSeek-V3"}
    assert suite.decoded[:3] == (("3inst", "3"), ("mcg", "3"), ("mul1", "3"))
