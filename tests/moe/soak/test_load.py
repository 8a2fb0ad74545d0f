"""Holds the load of a soak to all token counts, and to finding an output whose bits changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trellis_moe.soak.cli import SMALL
from trellis_moe.soak.layers import SoakLayer, bind_layers, plan_layers
from trellis_moe.soak.load import Graphs, Outcome, run_load


@pytest.fixture
def bound() -> tuple[list[SoakLayer], torch.Tensor]:
    return bind_layers(plan_layers(SMALL, "cpu")[:2], "cpu")


def test_every_launch_of_every_layer_runs_and_repeats(bound: tuple[list[SoakLayer], torch.Tensor]) -> None:
    layers, arena = bound
    before = [dict(layer.binding.counters) for layer in layers]
    outcome = run_load(layers, arena, None, seconds=0.0, least_runs=60, seed=3)
    assert outcome.runs == {"eager": 60}
    assert sum(outcome.tokens.values()) == 60
    assert set(outcome.tokens) >= {1, 2, 8, 32}
    assert outcome.mismatch_count == 0
    for layer, earlier in zip(layers, before, strict=True):
        assert all(layer.binding.counters[tokens] > earlier[tokens] for tokens in earlier)


def test_a_bit_that_changed_is_found(bound: tuple[list[SoakLayer], torch.Tensor]) -> None:
    layers, arena = bound
    for sets in layers[1].inputs.values():
        for inputs in sets:
            inputs.expected.view(torch.int16)[0, 7] ^= 1
    outcome = run_load(layers, arena, None, seconds=0.0, least_runs=40, seed=3)
    assert 0 < outcome.mismatch_count < 40
    assert {layer for layer, _, _ in outcome.mismatches} == {1}


def test_weights_that_changed_are_found(bound: tuple[list[SoakLayer], torch.Tensor]) -> None:
    layers, arena = bound
    layers[0].binding.experts.codes.bitwise_xor_(1)
    outcome = run_load(layers, arena, None, seconds=0.0, least_runs=20, seed=3)
    assert {layer for layer, _, _ in outcome.mismatches} == {0}


def test_the_load_lasts_as_long_as_it_is_told(bound: tuple[list[SoakLayer], torch.Tensor]) -> None:
    outcome = run_load(*bound, None, seconds=0.3)
    assert 0.3 <= outcome.seconds < 5


def test_only_the_first_mismatches_are_listed() -> None:
    outcome = Outcome()
    for _ in range(150):
        outcome.note(0, 9, "eager", same=False)
    assert (outcome.mismatch_count, len(outcome.mismatches), outcome.tokens) == (150, 100, {16: 150})


@pytest.mark.gpu
def test_gpu_graphs_replay_over_changed_inputs() -> None:
    sizes = replace(SMALL, scratch_bound=64 << 20)  # what the kernels of many tokens need does not shrink with a layer
    layers, arena = bind_layers(plan_layers(sizes, "cuda")[:2], "cuda")
    graphs = Graphs(layers, (1, 3, 8, 40))
    outcome = run_load(layers, arena, graphs, seconds=0.0, least_runs=80, seed=3)
    assert outcome.runs["graph"] > outcome.runs["eager"] > 0
    assert outcome.mismatches == []
