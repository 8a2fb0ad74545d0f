"""Holds timing to turns, warm-ups left out and samples of one launch; graphs on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from trellis_kernels.bench import timing
from trellis_kernels.bench.timing import Samples, alternating_samples, eager_samples, graph_samples

CPU = torch.device("cpu")


def test_median_and_spread_are_in_microseconds() -> None:
    samples = Samples((3_000, 1_000, 2_000, 10_000))
    assert (samples.median, samples.microseconds, samples.spread) == (2_500, 2.5, (1.0, 10.0))


def test_launches_take_turns_and_warm_ups_are_no_samples() -> None:
    calls: list[int] = []
    samples = eager_samples([lambda i=i: calls.append(i) for i in range(3)], device=CPU, count=4, warm_ups=2)
    assert calls == [0, 1, 2] * 6
    assert len(samples.nanoseconds) == 4
    assert min(samples.nanoseconds) >= 1


def test_a_sample_is_the_time_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 6_000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    assert eager_samples([lambda: None] * 3, device=CPU, count=2, warm_ups=0) == Samples((2_000, 2_000))


def test_contenders_alternate_their_order() -> None:
    calls: list[str] = []
    contenders = {name: [lambda name=name: calls.append(name)] for name in ("ours", "other")}
    found = alternating_samples(contenders, device=CPU, count=3, warm_ups=1)
    assert calls == ["ours", "other", "other", "ours", "ours", "other", "other", "ours"]
    assert {name: len(samples.nanoseconds) for name, samples in found.items()} == {"ours": 3, "other": 3}


@pytest.mark.gpu
def test_gpu_launches_take_turns_inside_a_graph() -> None:
    targets = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    samples = graph_samples([lambda target=target: target.add_(1.0) for target in targets], count=5, warm_ups=1)
    counts = {float(target[0]) for target in targets}
    assert counts == {1.0 + 5 * 6}  # a first launch, and 15 launches in each replay
    assert len(samples.nanoseconds) == 5


@pytest.mark.gpu
def test_gpu_contenders_are_graphs() -> None:
    fast, slow = torch.zeros(1 << 10, device="cuda"), torch.zeros(1 << 28, device="cuda")
    contenders = {"slow": [lambda: slow.add_(1.0)], "fast": [lambda: fast.add_(1.0)]}
    found = alternating_samples(contenders, device=torch.device("cuda"), count=5)
    assert found["fast"].median < found["slow"].median
    graph, launched = timing.capture([lambda: fast.add_(1.0)], least=4)
    before = float(fast[0])
    assert timing.replay_samples(graph, launched) >= 1
    assert float(fast[0]) == before + 4
