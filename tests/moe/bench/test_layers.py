"""Holds the measurement of layers to checked outputs, counted work, and rows of what the plan took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trellis_kernels.bench.timing import Samples
from trellis_moe.bench import layers as module
from trellis_moe.bench.layers import LayerBench, plan_layer
from trellis_moe.bench.presets import TINY
from trellis_moe.bench.record import COPY, Recorder
from trellis_moe.receipts.schema import LayerCase

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> LayerBench:
    return LayerBench(TINY, CPU)


def make_recorder(device: torch.device = CPU) -> Recorder:
    recorder = Recorder(device, seconds=60.0, samples=5, tell=lambda line: None)
    recorder.add_ceiling(COPY, "bytes", 1000, Samples((1000,) * 5))
    return recorder


def test_work_is_of_the_experts_that_routes_name(bench: LayerBench) -> None:
    work = bench.work(1)
    assert work.weights == 2 * 3 * 128 * 128  # one token, two experts
    assert work.nbytes == work.weights * 3 // 8 + 4 * 128
    assert work.flops == 2 * work.weights
    many = bench.work(64)
    assert many.weights == TINY.experts * 3 * 128 * 128
    assert many.flops == 64 * work.flops


def test_inputs_take_turns_and_are_the_same_every_time(bench: LayerBench) -> None:
    first, second = bench.inputs(5)
    assert not torch.equal(first[0], second[0])
    again = LayerBench(TINY, CPU).inputs(5)
    assert all(torch.equal(mine, other) for mine, other in zip(first, again[0], strict=True))


@pytest.mark.parametrize("io_dtype", ["float16", "bfloat16"])
def test_outputs_are_checked_and_kept(bench: LayerBench, io_dtype: str) -> None:
    prepared = bench.prepare(5, io_dtype=io_dtype)
    assert prepared.check.error <= prepared.check.bound
    assert prepared.memory.planned_bytes == prepared.memory.final_bytes == prepared.plan.required_nbytes()
    assert prepared.repeats()
    prepared.outputs[1][0, 0] += 1.0
    assert not prepared.repeats()


def test_a_wrong_output_is_refused(bench: LayerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(experts: object, x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full(x.shape, 2.0, dtype=torch.float64)

    monkeypatch.setattr(module, "float64_forward", wrong)
    with pytest.raises(ValueError, match="above its bound"):
        LayerBench(TINY, CPU).prepare(2)


def test_an_output_that_changes_is_no_measurement(bench: LayerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make_recorder()
    monkeypatch.setattr(module.Prepared, "repeats", lambda self: False)
    with pytest.raises(ValueError, match="differ from those of the first launch"):
        bench.measure(recorder, 2)
    assert recorder.rows == ()


def test_rows_say_what_the_plan_took(bench: LayerBench) -> None:
    recorder = make_recorder()
    bench.measure(recorder, 2)
    (row,) = recorder.rows
    assert isinstance(row.case, LayerCase)
    plan = plan_layer(TINY, 2, device=CPU)
    assert (row.case.path, row.case.arithmetic) == (plan.variant_for(2).path, "exact")
    assert (row.case.mode, row.case.tokens, row.case.contender) == ("eager", 2, "trellis")
    assert row.memory is not None
    assert len(row.samples_ns) == 5


def test_an_arithmetic_that_the_plan_does_not_take_is_left_out(bench: LayerBench) -> None:
    recorder = make_recorder()
    bench.measure(recorder, 2, arithmetic="bytes")
    assert recorder.rows == ()
    assert "exact products" in recorder._skipped[0].why


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["exact", "bytes"])
def test_gpu_layers_are_measured_in_a_graph_and_from_python(arithmetic: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    device = torch.device("cuda")
    recorder = make_recorder(device)
    LayerBench(replace(TINY, experts=8), device).measure(recorder, 4, arithmetic=arithmetic)
    cases = [row.case for row in recorder.rows if isinstance(row.case, LayerCase)]
    assert [case.mode for case in cases] == ["graph", "eager"]
    assert {case.arithmetic for case in cases} == {arithmetic}
    assert {case.path for case in cases} == {"moe_small"}


def test_a_bound_of_scratch_is_kept_and_said(bench: LayerBench) -> None:
    bound = bench.prepare(5).memory.planned_bytes - 1
    memory = bench.prepare(5, scratch_bound=bound).memory
    assert memory.planned_bytes <= bound
    assert memory.bound_bytes == bound
