"""Holds the read of native layer files to their extents, their manifest and their digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from exl3_files import write_bytes
from slot_files import random_linears, rows_by_loop
from trellis_format.errors import FormatNotFoundError, FormatTypeError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.boxes import BoxArray
from trellis_format.files.layer_file import file_sha256
from trellis_format.native.layer import trellis_from_native
from trellis_format.native.manifest import MANIFEST_NAME, NativeManifest, read_manifest
from trellis_format.native.reader import read_layer
from trellis_format.native.writer import plan_head, write_layer, write_manifest
from trellis_format.slots import read_linear

LAYER = random_linears(biased=True)
EXTENTS = [(0, 12), (0, 4), (4, 8), (8, 4)]
FILE = "trellis-layer-00002.safetensors"


def extent(first: int, count: int) -> TrellisExtent:
    return TrellisExtent(global_intermediate_size=384, first_slot=first, slot_count=count)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    head = plan_head({2: LAYER[0]})
    write_manifest(tmp_path, head, {2: write_layer(tmp_path, head, 2, *LAYER)})
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], None]) -> NativeManifest:
    """Change tensors and metadata of the file, and the digest in the manifest with them."""
    with safe_open(folder / FILE, "np") as file:
        metadata = dict(file.metadata())
    tensors = load_file(folder / FILE)
    change(tensors, metadata)
    save_file(tensors, folder / FILE, metadata)
    data = json.loads((folder / MANIFEST_NAME).read_text())
    data["layers"]["2"]["sha256"] = file_sha256(folder / FILE)
    (folder / MANIFEST_NAME).write_text(json.dumps(data))
    return read_manifest(folder)


@pytest.mark.parametrize("hold_codes", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("first", "count"), EXTENTS)
def test_an_extent_is_the_slice_of_every_array(
    folder: Path, first: int, count: int, verify: bool, hold_codes: bool
) -> None:
    share = extent(first, count)
    layer = read_layer(folder, read_manifest(folder), 2, share, verify=verify, hold_codes=hold_codes)
    assert isinstance(layer.codes, BoxArray) is not hold_codes
    assert np.array_equal(layer.codes.read(), rows_by_loop(LAYER)[first : first + count])
    source, weights = trellis_from_native(layer)
    assert source.extent == share
    channels = slice(32 * first, 32 * (first + count))
    assert np.array_equal(weights.intermediate_scales, LAYER[1].intermediate_scales[:, :, channels])
    assert np.array_equal(weights.input_scales, LAYER[1].input_scales)
    for projection, bias in LAYER[1].biases.items():
        expected = bias if projection == "down" else bias[:, channels]
        assert np.array_equal(weights.biases[projection], expected)
    for index in range(9):
        whole = LAYER[1].code_view(*divmod(index, 3)).read()
        tiles = slice(2 * first, 2 * (first + count))
        expected = whole[tiles] if index % 3 == 2 else whole[:, tiles]
        assert np.array_equal(read_linear(source, weights, *divmod(index, 3)), expected)


def test_changed_files_are_found_unless_told_not_to_look(folder: Path) -> None:
    data = bytearray((folder / FILE).read_bytes())
    data[-1] ^= 1
    (folder / FILE).write_bytes(data)
    manifest = read_manifest(folder)
    with pytest.raises(FormatValueError, match=rf"{FILE}: sha256 is [0-9a-f]{{64}}, the manifest says [0-9a-f]{{64}}"):
        read_layer(folder, manifest, 2)
    with pytest.raises(FormatValueError, match="sha256"):
        read_layer(folder, manifest, 2, extent(0, 4), hold_codes=False)
    assert read_layer(folder, manifest, 2, verify=False).extent.is_whole


def test_layers_extents_and_files_must_exist(folder: Path) -> None:
    manifest = read_manifest(folder)
    with pytest.raises(FormatValueError, match="has no layer 3; its layers: 2"):
        read_layer(folder, manifest, 3)
    with pytest.raises(FormatValueError, match="axis of 512 channels, the checkpoint of one of 384"):
        read_layer(folder, manifest, 2, TrellisExtent.whole(512))
    with pytest.raises(FormatValueError, match=r"channels 32\.\.160 cuts a Hadamard block of 128"):
        read_layer(folder, manifest, 2, extent(1, 4))
    with pytest.raises(FormatTypeError, match="manifest has the wrong type dict"):
        read_layer(folder, {}, 2)  # type: ignore[arg-type]
    with pytest.raises(FormatTypeError, match="extent has the wrong type tuple"):
        read_layer(folder, manifest, 2, (0, 4))  # type: ignore[arg-type]
    (folder / FILE).unlink()
    with pytest.raises(FormatNotFoundError, match=FILE):
        read_layer(folder, manifest, 2)


def test_tensors_must_be_exactly_those_of_the_configuration(folder: Path) -> None:
    manifest = rewrite(folder, lambda tensors, _: tensors.update(stray=tensors.pop("rate")))
    with pytest.raises(FormatValueError, match=r"unexpected: \['stray'\], missing: \['rate'\]"):
        read_layer(folder, manifest, 2)


@pytest.mark.parametrize("key", ["schema", "codebook", "layer", "num_experts", "hidden_size", "intermediate_size"])
def test_metadata_must_be_that_of_the_manifest(folder: Path, key: str) -> None:
    manifest = rewrite(folder, lambda _, metadata: metadata.update({key: "9"}))
    with pytest.raises(FormatValueError, match=rf"{FILE}: metadata {key} says '9', the manifest '"):
        read_layer(folder, manifest, 2)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("codes", lambda a: a[:-1], r"codes must be 2-D with 12 slot rows, got shape \[11, \d+\]"),
        ("codes", lambda a: a.reshape(-1), r"codes must be 2-D with 12 slot rows"),
        ("codes", lambda a: a[:, :-1], r"rows have \d+ bytes, their payload is exactly \d+"),
        ("codes", lambda a: a.astype(np.int16), "must be uint8, got I16"),
        ("rate", lambda a: a[:-1], r"rate must have shape \[3, 3\] for granularity per_expert_projection"),
        ("rate", lambda a: a ^ 1, "symmetric|nibble"),
        ("input_scales.vectors", lambda a: a.astype(np.float32), "must be float16, got F32"),
        ("bias.gate", lambda a: a.astype(np.float32), "must be float16, got F32"),
        ("output_scales.vectors", lambda a: np.repeat(a, 40, axis=1), "is larger than any table of 3 experts can be"),
        ("output_scales.vectors", lambda a: a.reshape(-1)[0], r"a scalar is stored as \[1\]"),
        ("input_scales.vectors", lambda a: a[:, :, :-1], r"per_expert vectors must have shape .* got \[3, 2, 255\]"),
        ("bias.down", lambda a: a[:-1], r"bias.down must have shape \[3, 256\], got \[2, 256\]"),
    ],
)
def test_headers_are_held_to_the_manifest_before_data(
    folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray], text: str
) -> None:
    def edit(tensors: dict[str, np.ndarray], _: dict[str, str]) -> None:
        tensors[name] = np.ascontiguousarray(change(tensors[name])) if name != "x" else tensors[name]
        if text.startswith("a scalar"):
            tensors[name] = np.array(tensors[name]).reshape(())

    manifest = rewrite(folder, edit)
    with pytest.raises(FormatValueError, match=text):
        read_layer(folder, manifest, 2)


def test_a_claim_of_many_experts_is_refused_at_once(tmp_path: Path) -> None:
    layer = random_linears(rates=(3,), shared=True)
    head = plan_head({2: layer[0]})
    entry = write_layer(tmp_path, head, 2, *layer)
    manifest = write_manifest(tmp_path, head, {2: entry})
    data = manifest.to_json()
    data["geometry"]["num_experts"] = 1 << 50
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(data))
    changed = rewrite(tmp_path, lambda _, metadata: metadata.update(num_experts=str(1 << 50)))
    with pytest.raises(FormatValueError, match=r"vectors must have shape \[1125899906842624, 3, 384\]"):
        read_layer(tmp_path, changed, 2)


def test_a_huge_sparse_file_is_refused_without_being_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    tensors, offset, header = load_file(folder / FILE), 0, {}
    for name, array in tensors.items():
        rows = 1 << 40 if name == "codes" else len(array)
        size = rows * 1 if name == "codes" else array.nbytes
        kind = {"uint8": "U8", "float16": "F16"}[array.dtype.name]
        shape = [rows, 1] if name == "codes" else list(array.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header["__metadata__"] = manifest.layer_metadata(2)  # type: ignore[assignment]
    path = write_bytes(folder / FILE, header)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + offset)
    with pytest.raises(FormatValueError, match="codes must be 2-D with 12 slot rows"):
        read_layer(folder, manifest, 2)
