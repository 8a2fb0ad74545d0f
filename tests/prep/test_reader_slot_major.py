"""Holds the read of slot-major codes to the linears that they were made of, in memory and in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from prep.samples import Layer, expected_tiles, extent_of, linears, random_layer
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray, ShardReader
from trellis_format.native.layer import trellis_from_native
from trellis_format.native.manifest import read_manifest
from trellis_format.native.reader import read_layer
from trellis_format.native.writer import plan_head, write_layer, write_manifest
from trellis_format.source import CodeLayout
from trellis_prep import PrepValueError, TrellisStaging, prepare
from trellis_prep.errors import PrepReadError
from trellis_prep.reader import ShareReader
from trellis_prep.selection import select_experts

SHARES = [(0, 3), (0, 1), (1, 2), (2, 1), (1, 0)]


def as_rows(layer: Layer) -> Layer:
    """The same layer with codes in slot-major rows, laid by loops over experts, projections, slots and planes."""
    source, weights = layer
    rows = [bytearray() for _ in range(source.extent.slot_count)]
    for expert, projection in linears(source):
        tiles = weights.code_view(expert, projection).read()
        down = source.geometry.projections[projection] == "down"
        for slot, row in enumerate(rows):
            for plane in (2 * slot, 2 * slot + 1):
                row += (tiles[plane] if down else tiles[:, plane]).tobytes()
    codes = np.array([list(row) for row in rows], dtype=np.uint8)
    return (
        dataclasses.replace(source, layout=CodeLayout.SLOT_MAJOR),
        dataclasses.replace(weights, codes=MemoryArray(codes)),
    )


def read(layer: Layer, expert: int, projection: int, extent: TrellisExtent, expected: np.ndarray) -> np.ndarray:
    """A linear's share, read into a buffer that was poisoned first."""
    out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
    ShareReader(*layer, extent).read(expert, projection, out)
    return out.view(np.int16).reshape(expected.shape)


@pytest.mark.parametrize(("first", "blocks"), SHARES)
@pytest.mark.parametrize("gated", [True, False])
def test_share_is_that_of_the_linear(first: int, blocks: int, gated: bool) -> None:
    layer = random_layer(gated=gated)
    rows, extent = as_rows(layer), extent_of(384, first, blocks)
    for expert, projection in linears(layer[0]):
        expected = expected_tiles(layer, extent, expert, projection)
        np.testing.assert_array_equal(read(rows, expert, projection, extent, expected), expected)


def test_rows_of_a_part_are_cut_at_their_own_origin() -> None:
    layer = random_layer()
    source, weights = as_rows(layer)
    held, extent = extent_of(384, 1, 2), extent_of(384, 2, 1)
    codes = MemoryArray(weights.codes.read()[held.first_slot :])
    local = (dataclasses.replace(source, extent=held), dataclasses.replace(weights, codes=codes))
    for expert, projection in linears(source):
        expected = expected_tiles(layer, extent, expert, projection)
        np.testing.assert_array_equal(read(local, expert, projection, extent, expected), expected)


@pytest.mark.parametrize("hold_codes", [True, False])
@pytest.mark.parametrize(("first", "blocks"), SHARES[:-1])
def test_file_gives_the_share(tmp_path: Path, hold_codes: bool, first: int, blocks: int) -> None:
    layer = random_layer()
    head = plan_head({0: layer[0]})
    write_manifest(tmp_path, head, {0: write_layer(tmp_path, head, 0, *layer)})
    extent = extent_of(384, first, blocks)
    found = trellis_from_native(read_layer(tmp_path, read_manifest(tmp_path), 0, extent, hold_codes=hold_codes))
    for expert, projection in linears(layer[0]):
        expected = expected_tiles(layer, extent, expert, projection)
        np.testing.assert_array_equal(read(found, expert, projection, extent, expected), expected)


@pytest.mark.parametrize("batch", [1, 2, 64])
@pytest.mark.parametrize("biased", [True, False])
def test_prepared_bytes_are_those_of_the_linears(biased: bool, batch: int) -> None:
    layer, staging = random_layer(biased=biased), TrellisStaging(max_experts=batch)
    for first, blocks in SHARES:
        extent = extent_of(384, first, blocks)
        straight = prepare(*layer, extent=extent)
        turned = prepare(*as_rows(layer), extent=extent, staging=staging, poison=True)
        assert straight.codes.numpy().tobytes() == turned.codes.numpy().tobytes()
        assert straight.intermediate_scales.numpy().tobytes() == turned.intermediate_scales.numpy().tobytes()


def test_rows_of_another_length_are_refused_before_anything_is_read() -> None:
    source, weights = as_rows(random_layer())
    codes = weights.codes.read()
    for wrong in (codes[:, :-1], codes[:-1]):
        with pytest.raises(PrepValueError, match=r"slot-major codes must be \[12, \d+\] \[slots, row_bytes\], got"):
            prepare(source, dataclasses.replace(weights, codes=MemoryArray(wrong)))


def test_file_cut_short_is_named_with_the_linear(tmp_path: Path) -> None:
    layer = random_layer()
    head = plan_head({0: layer[0]})
    entry = write_layer(tmp_path, head, 0, *layer)
    write_manifest(tmp_path, head, {0: entry})
    found = trellis_from_native(read_layer(tmp_path, read_manifest(tmp_path), 0, hold_codes=False))
    path = tmp_path / entry.file
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)
    with pytest.raises(PrepReadError, match=r"expert 2 down: .*truncated"):
        ShareReader(*found, layer[0].extent).read(
            2, 2, np.empty(expected_tiles(layer, layer[0].extent, 2, 2).nbytes, np.uint8)
        )


@pytest.mark.parametrize("projection", [0, 2])
def test_buffer_of_another_size_is_refused(projection: int) -> None:
    layer = as_rows(random_layer())
    with pytest.raises(PrepReadError, match="buffer must be"):
        ShareReader(*layer, extent_of(384, 0, 1)).read(0, projection, np.empty(16, dtype=np.uint8))


@pytest.mark.parametrize("chosen", [[0], [2, 0], range(1, 4), [3, 1, 2]])
@pytest.mark.parametrize(("first", "blocks"), SHARES)
def test_experts_of_rows_are_selected_as_those_of_linears(chosen: Sequence[int], first: int, blocks: int) -> None:
    layer, extent = random_layer(experts=4, biased=True), extent_of(384, first, blocks)
    straight = prepare(*select_experts(*layer, chosen), extent=extent)
    source, weights = select_experts(*as_rows(layer), chosen)
    turned = prepare(source, weights, extent=extent, poison=True)
    assert source == straight.source
    for name, tensor in straight.tensors.items():
        assert tensor.numpy().tobytes() == turned.tensors[name].numpy().tobytes(), name


def test_selected_experts_of_rows_read_their_own_bytes(tmp_path: Path) -> None:
    layer = random_layer(experts=4)
    head = plan_head({0: layer[0]})
    write_manifest(tmp_path, head, {0: write_layer(tmp_path, head, 0, *layer)})
    found = trellis_from_native(read_layer(tmp_path, read_manifest(tmp_path), 0, hold_codes=False))
    read: list[int] = []
    honest = ShardReader.read_runs

    def counted(self: ShardReader, offsets: Iterable[int], length: int, out: memoryview, tensor: str) -> None:
        read.append(len(out))
        honest(self, offsets, length, out, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardReader, "read_runs", counted)
        prepared = prepare(*select_experts(*found, [3, 1]), extent=extent_of(384, 1, 1))
    assert sum(read) == prepared.layout.code_bytes
