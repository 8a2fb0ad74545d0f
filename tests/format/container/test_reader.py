"""Holds the read of a container's layer files to their extents, to the bytes they touch, and to their digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from exl3_files import write_bytes
from slot_files import random_content, random_pair_content
from trellis_format.container import reader
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer
from trellis_format.container.manifest import MANIFEST_NAME, Manifest, read_manifest
from trellis_format.container.reader import read_layer
from trellis_format.container.writer import write_content, write_manifest
from trellis_format.errors import FormatNotFoundError, FormatTypeError, FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.extent import TrellisExtent
from trellis_format.files.boxes import BoxArray
from trellis_format.files.layer_file import LayerFile, file_sha256
from trellis_format.slots import read_linear

FILE = "exl3-layer-00003.safetensors"
CONTENT = random_content(experts=2, hidden=256, intermediate=512, row_alignment=5000)
EXTENTS = [(0, 16), (0, 4), (4, 8), (12, 4)]


def extent(first: int, count: int) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=512, first_slot=first, slot_count=count)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    write_manifest(tmp_path, CONTENT.head, {3: write_content(tmp_path, CONTENT)})
    return tmp_path


@pytest.fixture(name="files")
def _files(monkeypatch: pytest.MonkeyPatch) -> list[LayerFile]:
    """The layer files that a test opens."""
    opened: list[LayerFile] = []

    def open_file(path: Path) -> LayerFile:
        opened.append(LayerFile(path))
        return opened[-1]

    monkeypatch.setattr(reader, "LayerFile", open_file)
    return opened


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> Manifest:
    """Change tensors and metadata of the file, and the digest in the manifest with them."""
    with safe_open(folder / FILE, "np") as file:
        metadata = dict(file.metadata())
    tensors = load_file(folder / FILE)
    change(tensors, metadata)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / FILE, metadata)
    data = json.loads((folder / MANIFEST_NAME).read_text())
    data["layers"]["3"]["sha256"] = file_sha256(folder / FILE)
    (folder / MANIFEST_NAME).write_text(json.dumps(data))
    return read_manifest(folder)


def check_extent(found: ContainerLayer | ContainerPairLayer, first: int, count: int) -> None:
    rows = slice(first, first + count)
    assert isinstance(found, ContainerLayer)
    assert (found.layer, found.extent) == (3, extent(first, count))
    assert found.codes.read().tobytes() == CONTENT.codes.read()[rows].tobytes()
    assert found.rotations.tobytes() == CONTENT.rotations[rows].tobytes()
    for name in ("gate_suh", "up_suh", "down_svh"):
        assert getattr(found, name).tobytes() == getattr(CONTENT, name).tobytes()


@pytest.mark.parametrize("hold_codes", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("first", "count"), EXTENTS)
def test_an_extent_is_its_rows(folder: Path, first: int, count: int, verify: bool, hold_codes: bool) -> None:
    manifest = read_manifest(folder)
    found = read_layer(folder, manifest, 3, extent(first, count), verify=verify, hold_codes=hold_codes)
    assert isinstance(found.codes, BoxArray) is not hold_codes
    check_extent(found, first, count)


@pytest.mark.parametrize(("first", "count"), EXTENTS)
def test_without_a_digest_only_the_extents_bytes_are_touched(
    folder: Path, files: list[LayerFile], first: int, count: int
) -> None:
    tables = 3 * 2 * 256 * 2 + count * 2 * 3 * 32 * 2
    read_layer(folder, read_manifest(folder), 3, extent(first, count), verify=False)
    assert files[0].bytes_read == tables + count * CONTENT.codes.shape[1]
    layer = read_layer(folder, read_manifest(folder), 3, extent(first, count), verify=False, hold_codes=False)
    assert files[1].bytes_read == tables
    source, weights = trellis_from_exl3(layer)
    padding = count * (CONTENT.codes.shape[1] - weights.codes.shape[1])  # type: ignore[union-attr]
    assert files[1].bytes_read == tables + padding
    read_linear(source, weights, 1, 2)
    assert files[1].bytes_read == tables + padding + count * 256 // 16 * 64 * 3


@pytest.mark.parametrize("hold_codes", [True, False])
def test_with_a_digest_the_file_passes_once(folder: Path, files: list[LayerFile], hold_codes: bool) -> None:
    read_layer(folder, read_manifest(folder), 3, extent(4, 8), hold_codes=hold_codes)
    assert files[0].bytes_read == (folder / FILE).stat().st_size


def test_a_changed_byte_anywhere_is_found_unless_told_not_to_look(folder: Path) -> None:
    manifest, data = read_manifest(folder), (folder / FILE).read_bytes()
    for place in (len(data) - 1, len(data) - CONTENT.codes.nbytes // 2):
        changed = bytearray(data)
        changed[place] ^= 4
        (folder / FILE).write_bytes(changed)
        with pytest.raises(FormatValueError) as caught:
            read_layer(folder, manifest, 3, extent(0, 4), hold_codes=False)
        assert f"{FILE}: sha256 is {file_sha256(folder / FILE)}, the manifest says {manifest.entry(3).sha256}" in str(
            caught.value
        )
        check_extent(read_layer(folder, manifest, 3, extent(0, 4), verify=False), 0, 4)


def test_equal_input_vectors_are_one_storage(folder: Path) -> None:
    manifest = rewrite(folder, lambda tensors, _: tensors.update(up_suh=tensors["gate_suh"]))
    found = read_layer(folder, manifest, 3)
    assert found.up_suh is found.gate_suh
    assert trellis_from_exl3(found)[0].joint_input_scales


def test_layers_extents_and_files_must_exist(folder: Path) -> None:
    manifest = read_manifest(folder)
    with pytest.raises(FormatValueError, match="the container has no layer 2; its layers: 3"):
        read_layer(folder, manifest, 2)
    with pytest.raises(FormatValueError, match=r"first slot 2, count 4: .*alignment of 4 slots; .*first 0 count 8"):
        read_layer(folder, manifest, 3, extent(2, 4))
    with pytest.raises(FormatValueError, match="axis of 256 channels, the container of one of 512"):
        read_layer(folder, manifest, 3, TrellisExtent.whole(256))
    with pytest.raises(FormatTypeError, match="manifest has the wrong type dict"):
        read_layer(folder, {}, 3)  # type: ignore[arg-type]
    with pytest.raises(FormatTypeError, match="extent has the wrong type tuple"):
        read_layer(folder, manifest, 3, (0, 4))  # type: ignore[arg-type]
    (folder / FILE).unlink()
    with pytest.raises(FormatNotFoundError, match=FILE):
        read_layer(folder, manifest, 3)


@pytest.mark.parametrize("name", ["codes", "rotations", "gate_suh", "down_svh"])
def test_tensors_must_be_exactly_those_of_the_manifest(folder: Path, name: str) -> None:
    manifest = rewrite(folder, lambda tensors, _: tensors.update(sign_pattern=tensors.pop(name)))
    with pytest.raises(FormatValueError, match=rf"unexpected: \['sign_pattern'\], missing: \['{name}'\]"):
        read_layer(folder, manifest, 3)


@pytest.mark.parametrize(
    "key", ["schema", "codebook", "layer", "num_experts", "hidden_size", "intermediate_size", "slot_channels"]
)
def test_metadata_must_be_that_of_the_manifest(folder: Path, key: str) -> None:
    manifest = rewrite(folder, lambda _, metadata: metadata.update({key: "9"}))
    with pytest.raises(FormatValueError, match=rf"{FILE}: metadata {key} says '9', the manifest '"):
        read_layer(folder, manifest, 3)
    manifest = rewrite(folder, lambda _, metadata: metadata.pop(key) and None)
    with pytest.raises(FormatValueError, match=f"metadata {key} says nothing, the manifest '"):
        read_layer(folder, manifest, 3)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("codes", lambda a: a.astype(np.int16), "layer 3: codes must be uint8, got int16"),
        ("codes", lambda a: a.reshape(-1), "layer 3: codes must be 2-D"),
        ("codes", lambda a: a[:-1], "layer 3: codes have 15 rows, one for each slot, the extent 16"),
        ("rotations", lambda a: a[:, :, :, :-1], r"layer 3: rotations has shape .* expected \[16, 2, 3, 32\]"),
        ("rotations", lambda a: a.astype(np.float32), "layer 3: rotations must be float16, got float32"),
        ("up_suh", lambda a: a[0], r"layer 3: up_suh has shape \[256\], expected \[E,H\] = \[2, 256\]"),
    ],
)
def test_headers_are_held_to_the_manifest_before_data(
    folder: Path, files: list[LayerFile], name: str, change: Callable[[Any], Any], text: str
) -> None:
    manifest = rewrite(folder, lambda tensors, _: tensors.update({name: change(tensors[name])}))
    with pytest.raises(FormatValueError, match=rf"{FILE}: {text}"):
        read_layer(folder, manifest, 3)
    assert files[0].bytes_read == 0


def test_padding_in_a_file_is_checked_by_the_adapter(folder: Path) -> None:
    def edit(tensors: dict[str, Any], _: dict[str, str]) -> None:
        tensors["codes"][6, -1] = 3

    manifest = rewrite(folder, edit)
    for hold_codes in (True, False):
        layer = read_layer(folder, manifest, 3, extent(4, 4), hold_codes=hold_codes)
        with pytest.raises(FormatValueError, match=r"layer 3: padding of codes must be zero, slot 6 has 0x03 at byte"):
            trellis_from_exl3(layer)
        trellis_from_exl3(read_layer(folder, manifest, 3, extent(8, 4), hold_codes=hold_codes))


def test_a_huge_sparse_file_is_refused_without_being_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    header: dict[str, Any] = {"__metadata__": manifest.layer_metadata(3)}
    offset = 0
    for name, array in load_file(folder / FILE).items():
        shape = [1 << 40, 1] if name == "codes" else list(array.shape)
        size = 1 << 40 if name == "codes" else array.nbytes
        kind = {"uint8": "U8", "float16": "F16"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    path = write_bytes(folder / FILE, header)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + offset)
    with pytest.raises(FormatValueError, match="codes have 1099511627776 rows"):
        read_layer(folder, manifest, 3)


def test_pair_layers_are_their_own_type_and_cut_by_pairs(tmp_path: Path) -> None:
    content = random_pair_content()
    manifest = write_manifest(tmp_path, content.head, {3: write_content(tmp_path, content)})
    for first in (0, 8):
        found = read_layer(tmp_path, manifest, 3, extent(first, 8))
        assert isinstance(found, ContainerPairLayer)
        assert not isinstance(found, ContainerLayer)
        assert found.rates_fc1.tobytes() == content.rates_fc1[first // 8].tobytes()
        assert found.rates_fc2.tobytes() == content.rates_fc2[first // 8].tobytes()
        assert found.codes.read().tobytes() == content.codes.read()[first : first + 8].tobytes()
    with pytest.raises(FormatValueError, match=r"first slot 4, count 8: .*alignment of 8 slots"):
        read_layer(tmp_path, manifest, 3, extent(4, 8))
