"""Holds slot-major rows to explicit loops over slots, experts, projections, planes and tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_files import Layer, linear_by_loop, random_linears, rates_of, rows_by_loop
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.rates import ALL_RATES, Rate
from trellis_format.slots import (
    iterate_rows,
    linear_to_rows,
    read_linear,
    read_rows,
    row_bytes,
    rows_to_linear,
    section_bytes,
    section_offsets,
)
from trellis_format.source import CodeLayout


def as_rows(layer: Layer) -> Layer:
    """The same layer with its codes in rows that a loop laid."""
    source, weights = layer
    return (
        dataclasses.replace(source, layout=CodeLayout.SLOT_MAJOR),
        dataclasses.replace(weights, codes=MemoryArray(rows_by_loop(layer))),
    )


def blocks(first: int, count: int) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=384, first_slot=4 * first, slot_count=4 * count)


@pytest.mark.parametrize(("bits", "expected"), [(2, 28672), (3, 43008), (4, 57344), (1.5, 21504), (8, 114688)])
def test_sections_of_a_known_width(bits: float, expected: int) -> None:
    assert section_bytes(3584, Rate.of(bits)) == expected
    assert section_bytes(3584, Rate.of(3)) * 3 == 129024


def test_offsets_are_running_sums_over_experts_and_projections() -> None:
    source, _ = random_linears(experts=2, hidden=128, rates=(1, 2.5, 4, 8))
    assert section_offsets(source).tolist() == [0, 512, 1792, 3840, 7936, 8448, 9728]
    assert section_offsets(source).dtype == np.int64
    assert row_bytes(source) == 9728


def test_offsets_of_a_uniform_layer_do_not_need_a_table() -> None:
    source, _ = random_linears(experts=3, hidden=128, rates=(3,))
    assert section_offsets(source).tolist() == [1536 * place for place in range(10)]


@given(st.sampled_from(ALL_RATES), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.integers(0, 2**32))
def test_rows_and_linears_are_inverse(rate: Rate, slots: int, hidden: int, down: bool, seed: int) -> None:
    shape = (2 * slots, hidden) if down else (hidden, 2 * slots)
    rng = np.random.default_rng(seed)
    tiles = rng.integers(-(2**15), 2**15, (*shape, rate.tile_words16), dtype=np.int16)
    rows = linear_to_rows(tiles, down=down)
    assert rows.shape == (slots, section_bytes(16 * hidden, rate))
    assert np.array_equal(rows_to_linear(rows, rate, down=down), tiles)
    assert np.array_equal(linear_by_loop(rows, [[rate] * (2 - down)], 16 * hidden, 0, 0), tiles)


def test_down_is_a_view_both_ways() -> None:
    tiles = np.zeros((4, 3, 48), dtype=np.int16)
    rows = linear_to_rows(tiles, down=True)
    assert np.shares_memory(rows, tiles)
    assert np.shares_memory(rows_to_linear(rows, Rate.of(3), down=True), tiles)


def test_half_slots_and_half_planes_are_refused() -> None:
    with pytest.raises(FormatValueError, match="3 tiles of 16 channels are not whole slots of 32"):
        linear_to_rows(np.zeros((3, 2, 48), np.int16), down=True)
    with pytest.raises(FormatValueError, match="section of 96 bytes is not 2 planes of tiles of 96 bytes"):
        rows_to_linear(np.zeros((1, 96), np.uint8), Rate.of(3), down=True)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("first", "count"), [(0, 3), (0, 1), (1, 2), (2, 1), (1, 0)])
def test_both_layouts_give_the_same_linears(gated: bool, first: int, count: int) -> None:
    layer = random_linears(gated=gated)
    rows, share = as_rows(layer), blocks(first, count)
    for expert in range(3):
        for index, projection in enumerate(layer[0].geometry.projections):
            whole = layer[1].code_view(expert, index).read()
            cut = slice(8 * first, 8 * (first + count))
            expected = whole[cut] if projection == "down" else whole[:, cut]
            assert np.array_equal(read_linear(*layer, expert, index, share), expected)
            assert np.array_equal(read_linear(*rows, expert, index, share), expected)


def test_both_layouts_give_the_same_rows() -> None:
    layer = random_linears()
    expected, offsets = rows_by_loop(layer), section_offsets(layer[0])
    for made in (layer, as_rows(layer)):
        for index in range(9):
            found = read_rows(*made, *divmod(index, 3), blocks(1, 2))
            assert np.array_equal(found, expected[4:12, offsets[index] : offsets[index + 1]])


def test_rows_are_those_of_the_loop_over_tiles() -> None:
    layer = random_linears(experts=2, hidden=128, intermediate=128)
    rows, rates = rows_by_loop(layer), rates_of(layer[0])
    for expert in range(2):
        for projection in range(3):
            expected = layer[1].code_view(expert, projection).read()
            assert np.array_equal(linear_by_loop(rows, rates, 128, expert, projection), expected)


@pytest.mark.parametrize("padding", [0, 1, 4096])
@pytest.mark.parametrize("rows_held", [1, 5, 12, 100])
def test_rows_are_iterated_in_bands(padding: int, rows_held: int) -> None:
    layer = random_linears()
    stride = row_bytes(layer[0]) + padding
    for made in (layer, as_rows(layer)):
        bands = [band.copy() for band in iterate_rows(*made, stride, band_bytes=rows_held * stride)]
        assert max(band.size for band in bands) == min(rows_held, 12) * stride
        joined = np.concatenate(bands).reshape(12, stride)
        assert np.array_equal(joined[:, : stride - padding], rows_by_loop(layer))
        assert not joined[:, stride - padding :].any()


def test_rows_of_a_part_begin_at_the_part() -> None:
    layer = random_linears()
    source, weights = as_rows(layer)
    part = dataclasses.replace(source, extent=blocks(1, 1))
    held = dataclasses.replace(weights, codes=MemoryArray(rows_by_loop(layer)[4:8]))
    (band,) = iterate_rows(part, held, row_bytes(source))
    assert np.array_equal(band.reshape(4, -1), rows_by_loop(layer)[4:8])


def test_one_row_is_held_when_the_bound_is_smaller() -> None:
    layer = random_linears()
    assert sum(1 for _ in iterate_rows(*layer, row_bytes(layer[0]), band_bytes=1)) == 12


def test_a_stride_must_hold_a_row() -> None:
    layer = random_linears()
    size = row_bytes(layer[0])
    with pytest.raises(FormatValueError, match=f"rows of {size} bytes do not fit a stride of {size - 1} bytes"):
        next(iterate_rows(*layer, size - 1))
