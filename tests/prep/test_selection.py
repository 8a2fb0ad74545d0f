"""Holds the choice of experts to the chosen ones' bytes and outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from prep.samples import Layer, expected_tiles, extent_of, random_layer, random_tokens
from trellis_format.reference import moe_forward
from trellis_prep import (
    PrepTypeError,
    PrepValueError,
    expert_map,
    expert_ranges,
    prepare,
    select_experts,
)


@pytest.mark.parametrize("experts", [[0], [2, 0], [1, 2, 3], range(1, 4), [3]])
@pytest.mark.parametrize("shared", [True, False])
def test_prepared_choice_holds_the_chosen_bytes(experts: Sequence[int], shared: bool) -> None:
    layer = random_layer(experts=4, shared=shared, biased=True)
    extent = extent_of(384, 1, 2)
    prepared = prepare(*select_experts(*layer, experts), extent=extent, poison=True)
    weights = layer[1]
    for local, expert in enumerate(experts):
        for projection in range(3):
            tiles, rate = prepared.tiles(local, projection)
            np.testing.assert_array_equal(tiles.numpy(), expected_tiles(layer, extent, expert, projection))
            assert rate == layer[0].rates.rate(expert, projection)
        middle = weights.intermediate_scales[expert, :, 128:]
        np.testing.assert_array_equal(prepared.intermediate_scales[local].numpy(), middle)
        inputs = weights.input_scales if shared else weights.input_scales[expert]
        np.testing.assert_array_equal(prepared.input_scales[0 if shared else local].numpy(), inputs)
        outputs = weights.output_scales if shared else weights.output_scales[expert]
        np.testing.assert_array_equal(prepared.output_scales[0 if shared else local].numpy(), outputs)
    assert prepared.source.shared_input_scales == shared


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_of_experts_sum_to_the_whole(world: int) -> None:
    layer: Layer = random_layer(experts=5, intermediate=128, biased=True)
    x, ids, weights = random_tokens(layer[0])
    expected = moe_forward(*layer, x, ids, weights)
    total = np.zeros_like(expected)
    for owned in expert_ranges(5, world):
        table = expert_map(5, owned)
        local = np.where(ids >= 0, table[ids], -1)
        total += moe_forward(*select_experts(*layer, owned), x, local, weights)
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_neighbours_stay_views() -> None:
    layer = random_layer(experts=4)
    _, weights = select_experts(*layer, range(1, 3))
    assert np.shares_memory(weights.intermediate_scales, layer[1].intermediate_scales)
    assert weights.code_view(0, 0) is layer[1].code_view(1, 0)


def test_what_cannot_be_chosen_is_refused() -> None:
    source, weights = random_layer(experts=3)
    with pytest.raises(PrepValueError, match="none of 3 experts"):
        select_experts(source, weights, [])
    with pytest.raises(PrepValueError, match=r"expert 3 is outside 0\.\.2"):
        select_experts(source, weights, [0, 3])
    with pytest.raises(PrepValueError, match="expert 1 is owned twice"):
        select_experts(source, weights, [1, 1])
    with pytest.raises(PrepTypeError, match="expert must be an int"):
        select_experts(source, weights, ["0"])  # type: ignore[list-item]
