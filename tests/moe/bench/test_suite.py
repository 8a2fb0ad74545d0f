"""Holds a run to its order, its parts, and to compiling what it will launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe.bench.made_up import made_up_receipt
from trellis_kernels.layers import DeviceLimits
from trellis_moe.bench import suite as module
from trellis_moe.bench.layers import plan_layer
from trellis_moe.bench.presets import TINY
from trellis_moe.bench.record import COPY, GEMM, Recorder
from trellis_moe.bench.suite import PARTS, LayerRun, Suite, asked_suite, full_suite, run, suite_keys, tiny_suite
from trellis_moe.receipts.figures import FIGURES, judge
from trellis_moe.receipts.schema import LayerCase, OpCase, PrepareCase
from trellis_moe.receipts.store import dump

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


def test_every_kernel_of_a_layer_is_compiled_before() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    limits = DeviceLimits("sm_90a", 132)
    layer, around = LayerRun(TINY, (2,), (3,), (("bytes", (1,)),)), LayerRun(TINY, (700,))
    suite = Suite(decoded=(("mul1", "3"),), layers=(layer,), groups=("pack",), around=(around,))
    keys = suite_keys(suite, frozenset(PARTS), limits)
    kinds = {key.kernel for key in keys}
    assert {"decode", "pack_routes", "ceiling"} <= kinds
    for tokens, arithmetic in ((2, "exact"), (3, "exact"), (1, "bytes"), (700, "exact")):
        plan = plan_layer(TINY, tokens, device=torch.device("cuda"), arithmetic=arithmetic, limits=limits)
        assert plan.compile_keys()
        assert set(plan.compile_keys()) <= set(keys)


def test_the_full_suite_begins_with_what_is_asked() -> None:
    suite, asked = full_suite(), asked_suite()
    assert (suite.layers, suite.preparations, suite.decoded) == (asked.layers, asked.preparations, asked.decoded)
    assert suite.around[: len(asked.around)] == asked.around
    assert {layer.preset.name for layer in suite.layers[:4]} == {"GLM-4.5-Air", "Qwen3-30B-A3B", "DeepSeek-V3 TP8"}
    layers = (*suite.layers, *suite.around)
    assert {layer.preset.name for layer in layers} >= {"Kimi-K3 TP9", "Mixtral-8x7B", "DeepSeek-V3"}
    assert suite.decoded[:3] == (("3inst", "3"), ("mcg", "3"), ("mul1", "3"))


def test_the_full_suite_measures_nothing_twice() -> None:
    suite = full_suite()
    points = [
        (layer.preset, layer.io_dtype, tokens, arithmetic)
        for layer in (*suite.layers, *suite.around)
        for tokens, arithmetic in [*layer.runs(), *((tokens, "exact") for tokens in layer.compared)]
    ]
    assert len(points) == len(set(points))
    bounds = [(each.name, n) for each in (*suite.preparations, *suite.further_preparations) for n in each.bounds]
    assert len(bounds) == len(set(bounds))
    assert not set(suite.decoded) & set(suite.further)


@pytest.mark.parametrize(("spec", "why"), [(None, "it is not installed"), (object(), "its loader alone")])
def test_the_receipt_says_why_a_peer_is_not_in_it(monkeypatch: pytest.MonkeyPatch, spec: object, why: str) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    recorder = Recorder(CPU, seconds=600.0, samples=5, tell=lambda line: None)
    recorder.device = torch.device("cuda")
    stages = dict(module._stages(recorder, Suite(), frozenset(PARTS)))
    stages["other projects"]()
    assert [(each.what, each.why.partition(";")[0]) for each in recorder._skipped] == [
        ("exllamav3 in turns with trellis", why + " makes its layers" * (spec is not None))
    ]
    assert "other projects" not in dict(module._stages(recorder, Suite(), frozenset({"op"})))


def test_stages_are_told_with_their_seconds_and_kept() -> None:
    told: list[str] = []
    recorder = Recorder(CPU, seconds=600.0, samples=5, tell=told.append)
    kept: list[int] = []
    small = Suite(layers=(LayerRun(TINY, (1,)),), around=(LayerRun(TINY, (2,)),))
    run(recorder, small, ("layer",), keep=lambda: kept.append(len(recorder.rows)))
    assert kept == [0, 1, 2]
    stages = [line.partition("== ")[2].partition(":")[0] for line in told if "== " in line]
    assert stages == ["ceilings", "tiny", "tiny"]


def test_a_full_run_has_every_figure_that_one_gpu_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = made_up_receipt(full_suite(), monkeypatch)
    missing = {each.figure.target.title for each in judge(FIGURES, [receipt]) if each.found is None}
    assert missing == {figure.target.title for figure in FIGURES if figure.group == "ranks"}
    asked = made_up_receipt(asked_suite(), monkeypatch)
    assert {each.figure.target.title for each in judge(FIGURES, [asked]) if each.found is None} == missing
    assert receipt.skipped == ()
    assert len(dump(receipt)) < 60_000
