"""Holds the device layout to sums that are computed linear by linear."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from prep.samples import extent_of, linears, random_layer
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.rate_table import RateTable
from trellis_format.source import ExpertGeometry, Projection
from trellis_prep import PrepValueError, plan_layout


def linear_bytes(k: int, n: int, bits: float) -> int:
    """Bytes of a (k, n) linear at K bits per weight."""
    return int(k * n * bits) // 8


@pytest.mark.parametrize(("first", "blocks"), [(0, 3), (0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("gated", [True, False])
def test_linears_follow_each_other_projection_by_projection(first: int, blocks: int, gated: bool) -> None:
    source, _ = random_layer(experts=5, gated=gated)
    layout = plan_layout(source, extent_of(384, first, blocks))
    width, place = blocks * 128, 0
    for index, projection in enumerate(source.geometry.projections):
        matrix = (width, 256) if projection is Projection.DOWN else (256, width)
        assert layout.matrix(index) == matrix
        for expert in range(5):
            bits = source.rates.rate(expert, index).bits
            assert layout.offsets[expert, index] * 4 == place
            assert layout.half_bits[expert, index] == 2 * bits
            assert layout.linear_words(expert, index) * 4 == linear_bytes(*matrix, bits)
            assert place % 16 == 0
            place += linear_bytes(*matrix, bits)
    assert layout.code_bytes == place == source.code_bytes(layout.extent)


def test_whole_source_is_the_default_share() -> None:
    source, _ = random_layer()
    assert plan_layout(source).extent == source.extent


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("joint", [True, False])
def test_tables_are_counted_by_name(shared: bool, joint: bool) -> None:
    source, _ = random_layer(experts=4, shared=shared, joint=joint, biased=True)
    rows, inputs = (1 if shared else 4), (1 if joint else 2)
    first = {
        "input_scales": rows * inputs * 256 * 2,
        "intermediate_scales": 4 * 3 * 128 * 2,
        "output_scales": rows * 256 * 2,
        "descriptors": 4 * 3 * 2 * 8,
        "bias.gate": 4 * 128 * 2,
        "bias.up": 4 * 128 * 2,
        "bias.down": 4 * 256 * 2,
    }
    later = {name: size for name, size in first.items() if name != "bias.down"}
    for block, expected in ((0, first), (1, later)):
        layout = plan_layout(source, extent_of(384, block, 1))
        assert layout.table_bytes == expected
        assert layout.total_bytes == layout.code_bytes + sum(expected.values())


def test_kimi_k3_at_two_bits() -> None:
    for width, codes in ((384, 924_844_032), (256, 616_562_688), (128, 308_281_344)):
        geometry = ExpertGeometry(
            num_experts=896,
            hidden_size=3584,
            intermediate_size=3072,
            padded_hidden_size=3584,
            padded_intermediate_size=3072,
        )
        source = dataclasses.replace(
            random_layer(codebook="mcg", rates=("2",))[0],
            geometry=geometry,
            rates=RateTable(((4,),)),
            extent=TrellisExtent.whole(3072),
        )
        assert plan_layout(source, extent_of(3072, 0, width // 128)).code_bytes == codes


def test_offsets_pass_what_32_bits_hold() -> None:
    geometry = ExpertGeometry(
        num_experts=512,
        hidden_size=7168,
        intermediate_size=2048,
        padded_hidden_size=7168,
        padded_intermediate_size=2048,
    )
    source = dataclasses.replace(
        random_layer(rates=("8",))[0], geometry=geometry, rates=RateTable(((16,),)), extent=TrellisExtent.whole(2048)
    )
    layout = plan_layout(source)
    words = 7168 * 2048 // 4
    assert layout.offsets.dtype == np.int64
    assert layout.offsets[511, 2] == (3 * 512 - 1) * words > 2**32
    assert layout.code_words == 3 * 512 * words


def test_empty_share_takes_no_codes() -> None:
    source, _ = random_layer(biased=True)
    for block in (0, 3):
        layout = plan_layout(source, extent_of(384, block, 0))
        assert layout.code_words == 0
        assert {layout.linear_words(*linear) for linear in linears(source)} == {0}
        assert "bias.down" not in layout.table_bytes


def test_share_of_another_axis_is_refused() -> None:
    source, _ = random_layer()
    with pytest.raises(PrepValueError, match="axis of 512 channels, the weights of one of 384"):
        plan_layout(source, extent_of(512, 0, 1))


def test_share_outside_the_weights_is_refused() -> None:
    source, _ = random_layer()
    held = dataclasses.replace(source, extent=extent_of(384, 1, 1))
    with pytest.raises(PrepValueError, match=r"channels 128\.\.384 is outside the weights' 128\.\.256"):
        plan_layout(held, extent_of(384, 1, 2))
    with pytest.raises(PrepValueError, match=r"channels 0\.\.128 is outside"):
        plan_layout(held, extent_of(384, 0, 1))


def test_share_that_cuts_a_block_is_refused() -> None:
    source, _ = random_layer()
    extent = TrellisExtent(global_intermediate_size=384, first_slot=2, slot_count=4)
    with pytest.raises(FormatValueError, match=r"64\.\.192 cuts a Hadamard block of 128"):
        plan_layout(source, extent)
