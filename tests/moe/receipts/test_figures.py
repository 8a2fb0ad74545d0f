"""Holds the list of figures to layers that are measured and to distinct questions."""

from __future__ import annotations

from collections import Counter

import pytest

from receipt_samples import layer_row, make_receipt
from trellis_moe.bench.prepare import GPU_PREPARATIONS
from trellis_moe.bench.presets import PRESETS
from trellis_moe.bench.record import decode_ceiling
from trellis_moe.bench.suite import asked_suite
from trellis_moe.receipts.figures import FIGURES, Figure, judge
from trellis_moe.receipts.targets import (
    CeilingRate,
    EagerCost,
    LayerTime,
    NoSlower,
    Scratch,
    StagingPeak,
    StagingRate,
)

MEASURED = {
    (run.preset.name, run.preset.codebook, run.preset.k, tokens)
    for run in asked_suite().layers
    for tokens in (*run.tokens, *run.compared)
}


def test_no_figure_is_asked_twice() -> None:
    titles = Counter(figure.target.title for figure in FIGURES)
    assert [title for title, count in titles.items() if count > 1] == []


@pytest.mark.parametrize(
    "figure",
    [figure for figure in FIGURES if isinstance(figure.target, LayerTime | EagerCost | NoSlower | Scratch)],
    ids=lambda figure: figure.target.title,
)
def test_the_suite_of_what_is_asked_measures_every_layer_that_is_asked(figure: Figure) -> None:
    target = figure.target
    assert isinstance(target, LayerTime | EagerCost | NoSlower | Scratch)
    assert (target.geometry, target.codebook, target.k, target.tokens) in MEASURED
    if isinstance(target, NoSlower):
        runs = [run for run in asked_suite().layers if (run.preset.name, run.preset.k) == (target.geometry, target.k)]
        assert any(target.tokens in run.compared for run in runs)


def test_the_suite_of_what_is_asked_measures_every_ceiling_and_bound_that_is_asked() -> None:
    suite = asked_suite()
    names = {decode_ceiling(book, k) for book, k in (*suite.decoded, *suite.further)}
    assert {figure.target.name for figure in FIGURES if isinstance(figure.target, CeilingRate)} <= names
    bounds = {(each.name, bound) for each in GPU_PREPARATIONS for bound in each.bounds}
    bounds |= {(each.layers[0], each.layers[2]) for each in GPU_PREPARATIONS if each.layers is not None}
    asked = [figure.target for figure in FIGURES if isinstance(figure.target, StagingRate | StagingPeak)]
    assert {(target.layer, target.bound_bytes) for target in asked} <= bounds


def test_presets_have_the_names_that_figures_ask_for() -> None:
    layers = {(preset.name, preset.codebook, preset.k) for preset in PRESETS.values()}
    asked = {
        (figure.target.geometry, figure.target.codebook, figure.target.k)
        for figure in FIGURES
        if isinstance(figure.target, LayerTime | EagerCost | NoSlower | Scratch)
    }
    assert asked <= layers


def test_verdicts_have_three_words() -> None:
    figures = [Figure("few tokens", LayerTime("GLM-4.5-Air", "mul1", "3", tokens, 0.2)) for tokens in (1, 8, 16)]
    verdicts = judge(figures, [make_receipt([layer_row(1, 100_000), layer_row(8, 300_000)])])
    assert [verdict.word for verdict in verdicts] == ["met", "not met", "not measured"]
