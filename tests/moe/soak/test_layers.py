"""Holds the layers of a soak to their variety, their one arena, and outputs near float64."""

from __future__ import annotations

import pytest
import torch

from trellis_kernels.layers import DeviceLimits
from trellis_moe.soak.cli import SMALL
from trellis_moe.soak.layers import INPUT_SETS, SoakLayer, SoakSizes, bind_layers, plan_layers, same_bits


@pytest.fixture(scope="module")
def layers() -> list[SoakLayer]:
    return bind_layers(plan_layers(SMALL, "cpu"), "cpu")[0]


def test_layers_differ_in_codebook_rate_and_law() -> None:
    sources = [plan.weights.source for plan in plan_layers(SoakSizes(), "cpu")]
    assert len(sources) == 8
    assert {source.codebook for source in sources} == {"mul1", "mcg", "3inst"}
    assert any(not source.rates.is_uniform for source in sources)
    assert any(source.biased for source in sources)
    assert any(not source.geometry.gated for source in sources)
    assert sources[:4] == sources[4:]  # so that their kernels are compiled once


def test_a_gpu_has_launches_of_both_fused_paths() -> None:
    plans = plan_layers(SoakSizes(), "cuda", DeviceLimits("sm_90a", 132))
    for plan in plans:
        assert [variant.path for variant in plan.variants] == ["moe_small"] * 4 + ["prefill"]
        assert plan.required_nbytes() <= SoakSizes().scratch_bound
        assert all(variant.capturable for variant in plan.variants)
    assert len({key for plan in plans for key in plan.compile_keys()}) <= 60


def test_every_launch_has_inputs_with_known_outputs(layers: list[SoakLayer]) -> None:
    for layer in layers:
        assert set(layer.inputs) == {variant.tokens for variant in layer.binding.plan.variants} == set(layer.errors)
        for tokens, sets in layer.inputs.items():
            assert len(sets) == INPUT_SETS
            assert not same_bits(sets[0].expected, sets[1].expected)
            assert all(each.x.shape[0] == tokens and torch.isfinite(each.expected).all() for each in sets)
        assert 0 < max(layer.errors.values()) <= 4e-3


def test_layers_of_one_description_have_weights_of_their_own() -> None:
    pair, _ = bind_layers([plan_layers(SMALL, "cpu")[0]] * 2, "cpu")
    assert not torch.equal(pair[0].binding.experts.codes, pair[1].binding.experts.codes)
    assert pair[0].binding._scratch.data_ptr() == pair[1].binding._scratch.data_ptr()


def test_bits_are_compared_and_not_values() -> None:
    zero, minus = torch.zeros(2, dtype=torch.bfloat16), -torch.zeros(2, dtype=torch.bfloat16)
    nan = torch.full((2,), float("nan"), dtype=torch.bfloat16)
    assert torch.equal(zero, minus)
    assert not same_bits(zero, minus)
    assert same_bits(nan, nan.clone())
