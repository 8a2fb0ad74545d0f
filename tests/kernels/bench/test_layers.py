"""Holds the measurements' own float64 forward to the reference of trellis-format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cute.moe_samples import error, expected, make_experts, make_routes
from trellis_format.activations import Activation
from trellis_kernels.bench.layers import float64_forward, random_experts, random_source


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 1e-14),
        ({"rates": ["1.5", "3", "4"], "intermediate": 384}, 1e-14),
        ({"hidden": 318, "intermediate": 200, "shared": True, "joint": True}, 1e-14),
        ({"codebook": "3inst", "rates": ["2"], "biased": True, "up_divisor": 8.0}, 1e-14),
        # laws other than plain silu are taken from the torch backend, in float32
        ({"activation": Activation("relu2"), "biased": True}, 1e-6),
        ({"activation": Activation("swigluoai", limit=1.5, alpha=1.702, beta=1.0)}, 1e-6),
    ],
    ids=str,
)
def test_forward_is_the_reference(options: dict[str, Any], bound: float) -> None:
    experts = make_experts(**options)
    routes = make_routes(experts, 7)
    found = float64_forward(experts, routes.x, routes.ids, routes.weights, factor=experts.source.up_divisor)
    assert error(found, expected(experts, routes)) < bound


def test_layers_of_a_seed_repeat_and_others_differ() -> None:
    source = random_source(experts=2, hidden=128, intermediate=128, codebook="mcg", rates=["4", "2"])
    first, again, other = (random_experts(source, device="cpu", seed=seed) for seed in (0, 0, 1))
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, again.tensors[name])
        assert torch.equal(tensor, other.tensors[name]) == (name == "descriptors")
