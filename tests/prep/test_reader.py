"""Holds the read of one linear's share to plain slicing, and to the bytes it may touch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from prep.samples import expected_tiles, extent_of, linears, open_layer, random_layer, write_checkpoint
from trellis_format.errors import FormatValueError
from trellis_prep.reader import ShareReader


@pytest.mark.parametrize(("first", "blocks"), [(0, 3), (0, 1), (1, 2), (2, 1), (1, 0)])
@pytest.mark.parametrize("gated", [True, False])
def test_share_is_the_slice(first: int, blocks: int, gated: bool) -> None:
    layer = random_layer(gated=gated)
    extent = extent_of(384, first, blocks)
    for expert, projection in linears(layer[0]):
        expected = expected_tiles(layer, extent, expert, projection)
        out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
        ShareReader(*layer, extent).read(expert, projection, out)
        np.testing.assert_array_equal(out.view(np.int16).reshape(expected.shape), expected)


def test_weights_of_a_part_are_cut_at_their_own_origin() -> None:
    source, weights = random_layer()
    held = extent_of(384, 1, 2)
    part = tuple(
        tuple(
            type(view)(np.ascontiguousarray(expected_tiles((source, weights), held, expert, projection)))
            for projection, view in enumerate(row)
        )
        for expert, row in enumerate(weights.codes)
    )
    local = (dataclasses.replace(source, extent=held), dataclasses.replace(weights, codes=part))
    extent = extent_of(384, 2, 1)
    for expert, projection in linears(source):
        expected = expected_tiles((source, weights), extent, expert, projection)
        out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
        ShareReader(*local, extent).read(expert, projection, out)
        np.testing.assert_array_equal(out.view(np.int16).reshape(expected.shape), expected)


def test_file_gives_the_share_and_no_byte_more(tmp_path: Path) -> None:
    layer = random_layer()
    checkpoint, source, weights = open_layer(write_checkpoint(tmp_path, layer))
    extent = extent_of(384, 1, 1)
    with checkpoint:
        for expert, projection in linears(source):
            expected = expected_tiles(layer, extent, expert, projection)
            out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
            before = checkpoint.bytes_read
            ShareReader(source, weights, extent).read(expert, projection, out)
            assert checkpoint.bytes_read - before == expected.nbytes
            np.testing.assert_array_equal(out.view(np.int16).reshape(expected.shape), expected)


def test_buffer_of_another_size_is_refused() -> None:
    layer = random_layer()
    with pytest.raises(FormatValueError, match="buffer must be"):
        ShareReader(*layer, extent_of(384, 0, 1)).read(0, 0, np.empty(16, dtype=np.uint8))


def test_runs_are_those_of_the_share_in_its_file(tmp_path: Path) -> None:
    layer = random_layer()
    checkpoint, source, weights = open_layer(write_checkpoint(tmp_path, layer))
    extent = extent_of(384, 1, 1)
    with checkpoint:
        reader = ShareReader(source, weights, extent)
        for expert, projection in linears(source):
            runs = reader.runs(expert, projection)
            assert runs is not None
            content = Path(runs.reader.header.path).read_bytes()
            found = b"".join(content[place : place + runs.length] for place in (runs.begin + runs.places).tolist())
            assert found == expected_tiles(layer, extent, expert, projection).tobytes()
    assert ShareReader(*layer, extent).runs(0, 0) is None
