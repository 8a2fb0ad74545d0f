"""Owns the timing of launches: raw samples, eager and inside a CUDA graph.  It must not know what is launched.

Launches take turns, so that buffers that are together larger than the second-level cache come from device memory.  A
sample is the time of all launches together over their number; warm-ups are not samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Launch", "Samples", "alternating_samples", "capture", "eager_samples", "graph_samples", "replay_samples"]

Launch = Callable[[], object]
"""One launch on its own buffers, queued on the current stream."""

_WARM_UPS = 3


@dataclass(frozen=True)
class Samples:
    """Times of one launch.

    Args:
        nanoseconds: each at least 1.
    """

    nanoseconds: tuple[int, ...]

    @property
    def median(self) -> float:
        """Nanoseconds."""
        return statistics.median(self.nanoseconds)

    @property
    def microseconds(self) -> float:
        """The median."""
        return self.median / 1e3

    @property
    def spread(self) -> tuple[float, float]:
        """Fastest and slowest, microseconds."""
        return min(self.nanoseconds) / 1e3, max(self.nanoseconds) / 1e3


def eager_samples(
    launches: Sequence[Launch], *, device: torch.device, count: int = 20, warm_ups: int = _WARM_UPS
) -> Samples:
    """Time launches from Python, queued back to back, by the host's clock until the device is done.

    Args:
        launches: the same launch on different buffers; one sample queues each once.
        device: where they run.
        count: samples.
        warm_ups: turns before the first sample.
    """
    samples = []
    for turn in range(count + warm_ups):
        _wait(device)
        begin = time.perf_counter_ns()
        for launch in launches:
            launch()
        _wait(device)
        if turn >= warm_ups:
            samples.append(_each(time.perf_counter_ns() - begin, len(launches)))
    return Samples(tuple(samples))


def graph_samples(
    launches: Sequence[Launch], *, count: int = 20, warm_ups: int = _WARM_UPS, least: int = 16
) -> Samples:
    """Time launches inside one graph, by events around its replay.

    Args:
        launches: the same launch on different buffers.
        count: samples.
        warm_ups: replays before the first sample.
        least: launches that the graph has at least; where there are fewer they repeat.
    """
    for launch in launches:
        launch()  # what a first launch does once must not be captured
    torch.cuda.synchronize()
    graph, launched = capture(launches, least=least)
    for _ in range(warm_ups):
        graph.replay()
    return Samples(tuple(replay_samples(graph, launched) for _ in range(count)))


def alternating_samples(
    contenders: Mapping[str, Sequence[Launch]],
    *,
    device: torch.device,
    count: int = 20,
    warm_ups: int = _WARM_UPS,
    least: int = 1,
) -> dict[str, Samples]:
    """Time contenders in turns, each turn in the reverse order of the one before, so that drift meets all alike.

    Args:
        contenders: launches by name; on a GPU each contender is one graph.
        device: where they run.
        count: samples of each.
        warm_ups: turns before the first sample.
        least: launches that a graph has at least.
    """
    takes: dict[str, Callable[[], int]] = {}
    for name, launches in contenders.items():
        takes[name] = _taker(launches, device, least)
    samples: dict[str, list[int]] = {name: [] for name in takes}
    for turn in range(count + warm_ups):
        for name in list(takes)[:: 1 if turn % 2 == 0 else -1]:
            taken = takes[name]()
            if turn >= warm_ups:
                samples[name].append(taken)
    return {name: Samples(tuple(taken)) for name, taken in samples.items()}


def capture(launches: Sequence[Launch], *, least: int = 1) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of launches that were warmed up before, and how many it has.

    Args:
        launches: what to capture, in order.
        least: launches that the graph has at least; where there are fewer they repeat.
    """
    rounds = max(1, least // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph, rounds * len(launches)


def replay_samples(graph: torch.cuda.CUDAGraph, launched: int) -> int:
    """Nanoseconds of one of the launches of a graph, by events around one replay."""
    first, last = _event(), _event()
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return _each(first.elapsed_time(last) * 1e6, launched)


def _taker(launches: Sequence[Launch], device: torch.device, least: int) -> Callable[[], int]:
    if device.type != "cuda":
        return lambda: eager_samples(launches, device=device, count=1, warm_ups=0).nanoseconds[0]
    for launch in launches:
        launch()
    torch.cuda.synchronize(device)
    graph, launched = capture(launches, least=least)
    return lambda: replay_samples(graph, launched)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _each(nanoseconds: float, launches: int) -> int:
    return max(round(nanoseconds / launches), 1)
