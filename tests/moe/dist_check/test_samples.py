"""Holds the check's layers to legal noise of order one, and its routes to one meaning everywhere."""

from __future__ import annotations

import numpy as np
import torch

from trellis_format.activations import Activation
from trellis_format.reference import moe_forward
from trellis_kernels.bench.layers import random_source
from trellis_moe.dist_check.samples import noise_weights, random_routes
from trellis_prep.checks import check_weights

CPU = torch.device("cpu")


def test_noise_is_a_layer_whose_outputs_are_of_order_one() -> None:
    source = random_source(experts=3, hidden=256, intermediate=256, codebook="mul1", rates=["2", "3"])
    weights = noise_weights(source)
    check_weights(source, weights)
    routes = random_routes(source, 6, 2, dtype=torch.float16, device=CPU, seed=3)
    y = moe_forward(
        source, weights, routes.x.double().numpy(), routes.ids.numpy(), routes.weights.double().numpy(),
        activation=Activation("silu"),
    )  # fmt: skip
    assert 0.01 < np.sqrt((y**2).mean()) < 10
    first, second = (weights.code_view(expert, 0).read() for expert in (0, 1))
    assert first.shape != second.shape or not np.array_equal(first, second)


def test_equal_seeds_are_equal_layers() -> None:
    source = random_source(experts=2, hidden=128, intermediate=128, codebook="mcg", rates=["3"])
    one, same, other = noise_weights(source, seed=1), noise_weights(source, seed=1), noise_weights(source, seed=2)
    for expert in range(2):
        for projection in range(3):
            mine = one.code_view(expert, projection).read()
            np.testing.assert_array_equal(mine, same.code_view(expert, projection).read())
            assert not np.array_equal(mine, other.code_view(expert, projection).read())


def test_routes_of_a_token_go_to_different_experts_and_weigh_one() -> None:
    source = random_source(experts=5, hidden=128, intermediate=128, codebook="mcg", rates=["3"])
    routes = random_routes(source, 40, 3, dtype=torch.bfloat16, device=CPU, seed=0)
    assert all(len(set(row)) == 3 for row in routes.ids.tolist())
    assert set(routes.ids.flatten().tolist()) == set(range(5))
    assert torch.allclose(routes.weights.sum(1), torch.ones(40))
    assert routes.x.dtype == torch.bfloat16
