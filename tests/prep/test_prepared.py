"""Holds prepared experts to their storage: views of it, and its bytes."""

from __future__ import annotations

import pytest
import torch

from prep.samples import extent_of, linears, random_layer
from trellis_prep import prepare


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("block", [0, 1])
def test_bytes_are_those_that_the_layout_planned(gated: bool, biased: bool, shared: bool, block: int) -> None:
    layer = random_layer(gated=gated, biased=biased, shared=shared)
    prepared = prepare(*layer, extent=extent_of(384, block, 1))
    assert prepared.nbytes == prepared.layout.total_bytes


def test_tiles_are_views_that_meet_without_overlap() -> None:
    layer = random_layer()
    prepared = prepare(*layer)
    prepared.codes.fill_(-1)
    for expert, projection in linears(layer[0]):
        tiles, rate = prepared.tiles(expert, projection)
        assert rate == layer[0].rates.rate(expert, projection)
        assert (tiles == -1).all(), "another linear wrote here"
        tiles.zero_()
    assert not prepared.codes.any()


def test_descriptors_point_at_the_tiles() -> None:
    layer = random_layer()
    prepared = prepare(*layer, extent=extent_of(384, 1, 2))
    for expert, projection in linears(layer[0]):
        tiles, rate = prepared.tiles(expert, projection)
        offset, half_bits = prepared.descriptors[expert, projection].tolist()
        assert half_bits == rate.half_bits
        assert tiles.data_ptr() == prepared.codes.data_ptr() + 4 * offset
        words = prepared.codes[offset : offset + tiles.numel() // 2]
        assert torch.equal(words.view(torch.int16).reshape(tiles.shape), tiles)


def test_source_extent_and_device_are_the_given_ones() -> None:
    layer = random_layer()
    extent = extent_of(384, 1, 1)
    prepared = prepare(*layer, extent=extent)
    assert prepared.source is layer[0]
    assert prepared.extent == extent
    assert prepared.device == torch.device("cpu")
