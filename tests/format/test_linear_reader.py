"""Holds the read of rows of tiles to plain slicing, whatever the layout of the codes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from exl3_files import write_shard
from slot_files import Layer, random_linears, rows_by_loop
from trellis_format import linear_reader
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import FileRuns, MemoryArray
from trellis_format.files.layer_file import LayerFile
from trellis_format.linear_reader import LinearReader, SlotLinear, linear_view
from trellis_format.slots import section_offsets
from trellis_format.source import CodeLayout

SHARES = [(0, 3), (0, 1), (1, 2), (2, 1), (1, 0)]


def as_rows(layer: Layer) -> Layer:
    """The same layer with its codes in rows that a loop laid."""
    source, weights = layer
    return (
        dataclasses.replace(source, layout=CodeLayout.SLOT_MAJOR),
        dataclasses.replace(weights, codes=MemoryArray(rows_by_loop(layer))),
    )


def blocks(first: int, count: int) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=384, first_slot=4 * first, slot_count=4 * count)


def sliced(layer: Layer, expert: int, index: int, share: TrellisExtent) -> np.ndarray:
    """A linear's share by plain slicing: down is cut along k, the others along n."""
    whole = layer[1].code_view(expert, index).read()
    down = layer[0].geometry.projections[index] == "down"
    return whole[share.tiles] if down else whole[:, share.tiles]


@pytest.mark.parametrize("scratch", [1, 3000, 1 << 20])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("first", "count"), SHARES)
def test_any_rows_are_those_of_the_slice(
    gated: bool, first: int, count: int, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_reader, "SCRATCH_BYTES", scratch)
    layer, share = random_linears(gated=gated), blocks(first, count)
    readers = [LinearReader(*made, share) for made in (layer, as_rows(layer))]
    for expert, index in itertools.product(range(3), range(len(layer[0].geometry.projections))):
        expected = sliced(layer, expert, index, share)
        rows = len(expected)
        for start, end in {(0, rows), (0, rows // 2), (rows // 3, rows), (rows // 2, rows // 2), (rows // 3, rows - 1)}:
            if not 0 <= start <= end:
                continue
            for reader in readers:
                out = np.full(expected[start:end].nbytes, 0xA5, dtype=np.uint8)
                reader.read(expert, index, out, start, end)
                assert out.tobytes() == expected[start:end].tobytes()


def test_the_default_is_the_whole_share() -> None:
    layer, share = random_linears(), blocks(1, 2)
    for made in (layer, as_rows(layer)):
        for index in range(3):
            expected = sliced(layer, 2, index, share)
            out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
            LinearReader(*made, share).read(2, index, out)
            assert out.tobytes() == expected.tobytes()


def test_a_part_is_cut_at_its_own_origin() -> None:
    layer = random_linears()
    source, weights = as_rows(layer)
    held = dataclasses.replace(source, extent=blocks(1, 2))
    codes = dataclasses.replace(weights, codes=MemoryArray(rows_by_loop(layer)[4:]))
    for index in range(3):
        expected = sliced(layer, 1, index, blocks(2, 1))
        out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
        LinearReader(held, codes, blocks(2, 1)).read(1, index, out)
        assert out.tobytes() == expected.tobytes()


def test_rows_outside_and_buffers_of_another_size_are_refused() -> None:
    layer = random_linears()
    for made in (layer, as_rows(layer)):
        reader = LinearReader(*made, blocks(0, 1))
        for index in range(3):
            with pytest.raises(FormatValueError, match="buffer must be"):
                reader.read(0, index, np.empty(10, np.uint8))
            for first, end in ((0, 1000), (5, 4), (-1, 1)):
                with pytest.raises(
                    FormatValueError, match=rf"rows {first}\.\.{end} of tiles are outside the share's 0"
                ):
                    reader.read(0, index, np.empty(0, np.uint8), first, end)


def test_a_linear_of_rows_is_an_array_of_tiles() -> None:
    layer = random_linears()
    made = as_rows(layer)
    offsets = section_offsets(layer[0])
    for expert, index in itertools.product(range(3), range(3)):
        view = linear_view(*made, expert, index, offsets)
        expected = layer[1].code_view(expert, index).read()
        assert isinstance(view, SlotLinear)
        assert (view.shape, view.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(view.read(), expected)
        box = (slice(1, 3), slice(2, 5), slice(0, expected.shape[2]))
        out = np.full(expected[box].nbytes, 0xA5, dtype=np.uint8)
        view.read_box(box, out)
        assert out.tobytes() == expected[box].tobytes()
        assert linear_view(*layer, expert, index) is layer[1].code_view(expert, index)


def test_tiles_are_not_cut() -> None:
    view = linear_view(*as_rows(random_linears()), 0, 0)
    with pytest.raises(FormatValueError, match=r"box cuts tiles: 1 of \d+ words"):
        view.read_box((slice(0, 1), slice(0, 1), slice(0, 1)), np.empty(2, np.uint8))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("first", "count"), SHARES)
def test_runs_are_the_bytes_in_the_file_and_where_they_go(tmp_path: Path, gated: bool, first: int, count: int) -> None:
    layer, share = random_linears(gated=gated), blocks(first, count)
    source, weights = as_rows(layer)
    with LayerFile(write_shard(tmp_path / "a.safetensors", {"codes": weights.codes.read()})) as file:
        rows = dataclasses.replace(weights, codes=file.tensors["codes"])
        reader, content = LinearReader(source, rows, share), Path(file.path).read_bytes()  # experts of two rates
        assert (len({runs.length for expert in range(3) if (runs := reader.runs(expert, 0))}) > 1) == (count > 0)
        for expert, index in itertools.product(range(3), range(len(source.geometry.projections))):
            whole = sliced(layer, expert, index, share)
            for start, end in {(0, len(whole)), (0, len(whole) // 2), (len(whole) // 3, len(whole) - 1)}:
                if start <= end:
                    check_runs(reader.runs(expert, index, start, end), whole[start:end], content)


def check_runs(runs: FileRuns | None, expected: np.ndarray, content: bytes) -> None:
    """Hold runs to the tiles whose bytes they should be, each written once."""
    if not expected.size:
        assert runs is None
        return
    assert runs is not None
    stored = b"".join(content[place : place + runs.length] for place in (runs.begin + runs.places).tolist())
    out = np.full(expected.nbytes, 0xA5, dtype=np.uint8)
    places = np.array([[0]]) if runs.scatter is None else runs.scatter
    assert places.shape[0] == (1 if runs.scatter is None else len(runs.places))
    assert sorted(places.reshape(-1)) == list(range(0, out.size, out.size // places.size))
    segments = np.frombuffer(stored, np.uint8).reshape(places.size, -1)
    for place, segment in zip(places.reshape(-1).tolist(), segments, strict=True):
        out[place : place + segment.size] = segment
    assert out.tobytes() == expected.tobytes()


def test_runs_that_scatter_to_more_places_than_a_system_call_takes_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, weights = as_rows(random_linears())
    with LayerFile(write_shard(tmp_path / "a.safetensors", {"codes": weights.codes.read()})) as file:
        reader = LinearReader(source, dataclasses.replace(weights, codes=file.tensors["codes"]), blocks(0, 1))
        monkeypatch.setattr(linear_reader, "MOST_SEGMENTS", source.geometry.padded_hidden_size // 16 - 1)
        assert [reader.runs(0, index) is None for index in range(3)] == [True, True, False]


def test_runs_of_memory_are_not_told() -> None:
    for made in (random_linears(), as_rows(random_linears())):
        reader = LinearReader(*made, blocks(0, 1))
        assert [reader.runs(0, index) for index in range(3)] == [None] * 3
        with pytest.raises(FormatValueError, match="outside the share's"):
            reader.runs(0, 0, 0, 10_000)
