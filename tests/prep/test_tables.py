"""Holds the rows of a share's tables to the rows and channels of the layer's arrays."""

from __future__ import annotations

import numpy as np
import pytest

from prep.samples import extent_of, random_layer
from trellis_format.source import Projection
from trellis_prep import plan_layout
from trellis_prep.tables import table_rows


@pytest.mark.parametrize(("first", "blocks"), [(0, 3), (0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("experts", [1, 3])
def test_rows_are_slices(first: int, blocks: int, shared: bool, experts: int) -> None:
    source, weights = random_layer(experts=experts, shared=shared, biased=True)
    channels = slice(first * 128, (first + blocks) * 128)
    rows = table_rows(weights, plan_layout(source, extent_of(384, first, blocks)))
    count = 1 if shared else experts
    np.testing.assert_array_equal(rows["input_scales"], weights.input_scales.reshape(2 * count, 256))
    np.testing.assert_array_equal(rows["output_scales"], weights.output_scales.reshape(count, 256))
    expected = np.stack([weights.intermediate_scales[e, p, channels] for e in range(experts) for p in range(3)])
    np.testing.assert_array_equal(rows["intermediate_scales"], expected)
    for projection in (Projection.GATE, Projection.UP):
        np.testing.assert_array_equal(rows[f"bias.{projection}"], weights.biases[projection][:, channels])
    assert ("bias.down" in rows) == (first == 0)
    if first == 0:
        np.testing.assert_array_equal(rows["bias.down"], weights.biases[Projection.DOWN])


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_fill_the_planned_tables(block: int, gated: bool) -> None:
    source, weights = random_layer(biased=True, gated=gated)
    layout = plan_layout(source, extent_of(384, block, 1))
    rows = table_rows(weights, layout)
    assert {name: array.nbytes for name, array in rows.items()} == layout.table_bytes
    assert {name: str(array.dtype) for name, array in rows.items()} == {t.name: t.dtype for t in layout.tables}


def test_descriptors_are_offset_and_doubled_rate() -> None:
    source, weights = random_layer()
    layout = plan_layout(source)
    rows = table_rows(weights, layout)["descriptors"]
    for expert in range(3):
        for projection in range(3):
            half_bits = source.rates.rate(expert, projection).half_bits
            assert rows[3 * expert + projection].tolist() == [layout.offsets[expert, projection], half_bits]


def test_large_tables_are_views() -> None:
    source, weights = random_layer(biased=True)
    rows = table_rows(weights, plan_layout(source, extent_of(384, 1, 1)))
    for name, array in weights.scale_arrays().items():
        if name != "bias.down":
            assert np.shares_memory(rows[name], array), name
