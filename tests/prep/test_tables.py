"""Holds the tables of a share to the rows and channels of the layer's arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prep.samples import extent_of, random_layer
from trellis_format.source import Projection
from trellis_prep import plan_layout
from trellis_prep.tables import move_tables

CPU = torch.device("cpu")


@pytest.mark.parametrize(("first", "blocks"), [(0, 3), (0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("experts", [1, 3])
def test_tables_are_slices(first: int, blocks: int, shared: bool, experts: int) -> None:
    source, weights = random_layer(experts=experts, shared=shared, biased=True)
    channels = slice(first * 128, (first + blocks) * 128)
    layout = plan_layout(source, extent_of(384, first, blocks))
    tables = move_tables(weights, layout, CPU)
    rows = 1 if shared else experts
    np.testing.assert_array_equal(tables.input_scales, weights.input_scales.reshape(rows, 2, 256))
    np.testing.assert_array_equal(tables.output_scales, weights.output_scales.reshape(rows, 256))
    np.testing.assert_array_equal(tables.intermediate_scales, weights.intermediate_scales[:, :, channels])
    for projection in (Projection.GATE, Projection.UP):
        np.testing.assert_array_equal(tables.biases[projection], weights.biases[projection][:, channels])
    assert (Projection.DOWN in tables.biases) == (first == 0)
    if first == 0:
        np.testing.assert_array_equal(tables.biases[Projection.DOWN], weights.biases[Projection.DOWN])


def test_descriptors_are_offset_and_doubled_rate() -> None:
    source, weights = random_layer()
    layout = plan_layout(source)
    descriptors = move_tables(weights, layout, CPU).descriptors
    assert descriptors.dtype == torch.int64
    for expert in range(3):
        for projection in range(3):
            expected = [layout.offsets[expert, projection], source.rates.rate(expert, projection).half_bits]
            assert descriptors[expert, projection].tolist() == expected


def test_tables_own_their_storage() -> None:
    source, weights = random_layer(biased=True)
    tables = move_tables(weights, plan_layout(source), CPU)
    kept = {name: array.copy() for name, array in weights.scale_arrays().items()}
    for array in weights.scale_arrays().values():
        array.fill(7.0)
    np.testing.assert_array_equal(tables.input_scales, kept["input_scales"])
    np.testing.assert_array_equal(tables.intermediate_scales, kept["intermediate_scales"])
    np.testing.assert_array_equal(tables.output_scales, kept["output_scales"])
    np.testing.assert_array_equal(tables.biases[Projection.DOWN], kept["bias.down"])
