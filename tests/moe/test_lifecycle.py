"""Holds the step from plan to prepared weights to the planned share, device, bound and progress."""

from __future__ import annotations

import pytest
import torch

from moe.samples import Layer, bits, launch, make_layer, make_plan, make_routes
from trellis_moe import bind, plan_weights, prepare_weights
from trellis_prep import PrepValueError, TrellisStaging, even_extents


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("1", "2.5", "4", "8"), biased=True)


def test_what_is_prepared_is_the_planned_share(layer: Layer) -> None:
    extent = even_extents(384, 3)[2]
    experts = prepare_weights(plan_weights(layer.source, extent), layer.weights)
    assert (experts.source, experts.extent, experts.device.type) == (layer.source, extent, "cpu")
    codes, rate = experts.tiles(4, 1)
    assert rate == layer.source.rates.rate(4, 1)
    assert bits(codes) == layer.weights.code_view(4, 1).read()[:, 16:24].tobytes()


def test_staging_bounds_change_no_bit(layer: Layer) -> None:
    plan, routes = make_plan(layer, tokens=4, top_k=2), make_routes(layer, 4, 2)
    largest = max(layer.source.expert_code_bytes(expert) for expert in range(5))
    results = []
    for staging in (None, TrellisStaging(max_bytes=largest), TrellisStaging(max_experts=2)):
        experts = prepare_weights(plan.weights, layer.weights, staging=staging)
        results.append(bits(launch(bind(plan, experts), routes)))
    assert len(set(results)) == 1
    with pytest.raises(PrepValueError, match=f"{largest - 1} bytes is insufficient.* {largest} bytes"):
        prepare_weights(plan.weights, layer.weights, staging=TrellisStaging(max_bytes=largest - 1))


def test_progress_counts_bytes_up_to_the_planned_ones(layer: Layer) -> None:
    seen: list[tuple[int, int]] = []
    plan, staging = plan_weights(layer.source), TrellisStaging(max_experts=1)
    prepare_weights(plan, layer.weights, staging=staging, progress=lambda *step: seen.append(step))
    total = seen[-1][1]
    assert total in (layer.source.code_bytes(), plan.required_nbytes())
    assert len(seen) >= 5
    assert {step[1] for step in seen} == {total}
    assert [step[0] for step in seen] == sorted(step[0] for step in seen)
    assert seen[-1][0] == total


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_refused(layer: Layer) -> None:
    with pytest.raises(PrepValueError, match="cuda"):
        prepare_weights(plan_weights(layer.source), layer.weights, device="cuda")


@pytest.mark.gpu
def test_the_device_is_taken(layer: Layer) -> None:
    experts = prepare_weights(plan_weights(layer.source), layer.weights, device="cuda")
    assert experts.device == torch.device("cuda", torch.cuda.current_device())
    assert bits(experts.codes) == bits(prepare_weights(plan_weights(layer.source), layer.weights).codes)
