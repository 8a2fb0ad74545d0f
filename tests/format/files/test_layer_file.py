"""Holds the read of layer files to the rows asked for, and the digest to every byte of the file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3_files import write_bytes, write_shard
from trellis_format.errors import FormatNotFoundError, FormatValueError
from trellis_format.files import layer_file
from trellis_format.files.layer_file import LayerFile, file_sha256

TENSORS = {
    "codes": np.arange(12 * 50, dtype=np.uint8).reshape(12, 50),
    "table": np.arange(12 * 3, dtype=np.float16).reshape(12, 3),
    "signs": np.arange(5, dtype=np.uint8),
}


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write_shard(tmp_path / "layer.safetensors", TENSORS)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 400), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_numpys_slices_with_and_without_a_digest(
    path: Path, first: int, end: int, piece: int, verify: bool
) -> None:
    first, end = min(first, end), max(first, end)
    rows = {"codes": slice(first, end), "table": slice(0, end), "signs": slice(0, 5)}
    with pytest.MonkeyPatch.context() as patch, LayerFile(path) as file:
        patch.setattr(layer_file, "_PIECE_BYTES", piece)
        found = file.load(rows, sha256=digest_of(path) if verify else None)
        wanted = sum(array.nbytes for array in found.values())
        assert file.bytes_read == (path.stat().st_size if verify else wanted)
    for name, part in rows.items():
        assert found[name].dtype == TENSORS[name].dtype
        assert np.array_equal(found[name], TENSORS[name][part])


@pytest.mark.parametrize("spelling", [str.lower, str.upper])
def test_digests_are_compared_in_any_case(path: Path, spelling: type[str]) -> None:
    with LayerFile(path) as file:
        found = file.load({"signs": slice(0, 5)}, sha256=spelling(digest_of(path)))
    assert np.array_equal(found["signs"], TENSORS["signs"])


def test_any_changed_byte_is_found(path: Path) -> None:
    expected = digest_of(path)
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little") + 8
    for place in range(header, len(data), 37):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with LayerFile(path) as file, pytest.raises(FormatValueError) as caught:
            file.load({"signs": slice(0, 5)}, sha256=expected)
        assert f"{path}: sha256 is {digest_of(path)}, the manifest says {expected}" in str(caught.value)


def test_without_a_digest_changes_are_not_found(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with LayerFile(path) as file:
        assert file.load({"signs": slice(0, 5)}, sha256=None)["signs"][-1] == TENSORS["signs"][-1] ^ 1


def test_names_must_be_exactly_those(path: Path) -> None:
    with LayerFile(path) as file:
        file.check_names(set(TENSORS))
        with pytest.raises(FormatValueError) as caught:
            file.check_names({"codes", "table", "rotations"})
    text = str(caught.value)
    assert str(path) in text
    assert "exactly the tensors ['codes', 'rotations', 'table']" in text
    assert "unexpected: ['signs'], missing: ['rotations']" in text


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    tensors = {f"tensor{number:03d}": np.zeros(1, np.uint8) for number in range(100)}
    file = LayerFile(write_shard(tmp_path / "x.safetensors", tensors))
    with pytest.raises(FormatValueError, match=r"'tensor007'\] and 92 more, missing: none"):
        file.check_names(set())


def test_metadata_must_state_the_same(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "x.safetensors", {"__metadata__": {"schema": "a", "layer": "3", "note": "free"}})
    with LayerFile(path) as file:
        file.check_metadata({"schema": "a", "layer": "3"})
        with pytest.raises(FormatValueError, match=r"x\.safetensors: metadata layer says '3', the manifest '4'"):
            file.check_metadata({"schema": "a", "layer": "4"})
        with pytest.raises(FormatValueError, match="metadata codebook says nothing, the manifest 'mcg'"):
            file.check_metadata({"codebook": "mcg"})


@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_a_file_cut_after_its_header_is_refused(path: Path, digest: str | None) -> None:
    with LayerFile(path) as file:
        file.load({"codes": slice(0, 1)}, sha256=None)
        os.truncate(path, path.stat().st_size - 20)
        with pytest.raises(FormatValueError, match=r"truncated|changed while it was read"):
            file.load({name: slice(0, len(array)) for name, array in TENSORS.items()}, sha256=digest)


def test_a_file_that_was_replaced_is_refused(path: Path) -> None:
    with LayerFile(path) as file:
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
        with pytest.raises(FormatValueError, match="changed after its header was read"):
            file.load({"codes": slice(0, 1)}, sha256=None)


def test_digest_of_a_whole_file(path: Path, tmp_path: Path) -> None:
    assert file_sha256(path) == digest_of(path)
    with pytest.raises(FormatValueError, match="cannot be read: No such file"):
        file_sha256(tmp_path / "nothing")
    with pytest.raises(FormatNotFoundError):
        LayerFile(tmp_path / "nothing")
