"""Holds a cached share's file to the tensors that were written, and to refusing everything else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from prep.samples import extent_of, random_layer
from trellis_format.errors import FormatNotFoundError, FormatValueError
from trellis_prep import PreparedExperts, plan_layout, plan_preparation, prepare
from trellis_prep.cache_file import CacheFile, write_cache_file
from trellis_prep.preparation import fill_tensors

KEY = "ab" * 32
CPU = torch.device("cpu")


@pytest.fixture
def prepared() -> PreparedExperts:
    """A share of a biased layer of mixed rates."""
    return prepare(*random_layer(biased=True), extent=extent_of(384, 0, 2))


@pytest.fixture
def path(tmp_path: Path, prepared: PreparedExperts) -> Path:
    """Its file."""
    path = tmp_path / f"{KEY}.safetensors"
    write_cache_file(path, KEY, prepared, piece_bytes=1000)
    return path


def load(path: Path, prepared: PreparedExperts, key: str = KEY) -> PreparedExperts:
    plan = plan_preparation(prepared.source, extent=prepared.extent)
    entry = CacheFile(path, plan.layout, key)
    loaded = fill_tensors(plan, CPU, lambda tensors: entry.loads(tensors, 777), poison=True)
    entry.check_digest()
    return loaded


def test_loaded_tensors_are_those_that_were_written(path: Path, prepared: PreparedExperts) -> None:
    loaded = load(path, prepared)
    assert loaded.tensors.keys() == prepared.tensors.keys()
    for name, tensor in prepared.tensors.items():
        assert loaded.tensors[name].shape == tensor.shape
        assert torch.equal(loaded.tensors[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_file_is_plain_safetensors(path: Path, prepared: PreparedExperts) -> None:
    found = load_file(path)
    for name, tensor in prepared.tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


def test_nothing_is_left_beside_it(path: Path) -> None:
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place:][1:]


def replace_text(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old.encode(), new.encode(), 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip(-1), "sha256 of the data is .* the entry states"),
        (flip(-100_000), "sha256"),
        (lambda data: data[:-1], ""),
        (lambda data: data[: len(data) // 2], ""),
        (lambda data: data[:5], ""),
        (lambda data: b"", ""),
        (lambda data: data + b"\0", ""),
        (replace_text('"layout_version":"1"', '"layout_version":"2"'), "layout_version is '2', not '1'"),
        (replace_text(KEY, "cd" * 32), "key is '(cd)+'"),
        (replace_text("trellis-prep/prepared/1", "trellis-prep/prepared/2"), "schema is"),
        (replace_text('"sha256"', '"sha257"'), "without a sha256"),
        (replace_text('"codes"', '"cones"'), "entry holds"),
        (replace_text('"F16"', '"I16"'), "entry holds"),
    ],
)
def test_damage_is_refused(
    path: Path, prepared: PreparedExperts, damage: Callable[[bytes], bytes], message: str
) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatValueError, match=message or "."):
        load(path, prepared)


def test_entry_of_another_share_is_refused(path: Path, prepared: PreparedExperts) -> None:
    other = plan_layout(prepared.source, extent_of(384, 0, 1))
    with pytest.raises(FormatValueError, match="entry holds"):
        CacheFile(path, other, KEY)


def test_no_entry_is_not_damage(tmp_path: Path, prepared: PreparedExperts) -> None:
    with pytest.raises(FormatNotFoundError):
        CacheFile(tmp_path / "none.safetensors", prepared.layout, KEY)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, prepared: PreparedExperts, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        write_cache_file(tmp_path / "x.safetensors", KEY, prepared, 1000)
    assert list(tmp_path.iterdir()) == []


def test_empty_share_has_a_file_too(tmp_path: Path) -> None:
    prepared = prepare(*random_layer(), extent=extent_of(384, 3, 0))
    path = tmp_path / "x.safetensors"
    write_cache_file(path, KEY, prepared, 1000)
    assert torch.equal(load(path, prepared).input_scales, prepared.input_scales)


def test_data_begins_where_the_largest_element_may(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert entries["descriptors"]["data_offsets"][0] % 8 == 0


@pytest.mark.parametrize("locked", [False, True])
def test_what_killed_writers_left_is_swept_and_nothing_else(
    tmp_path: Path, prepared: PreparedExperts, locked: bool
) -> None:
    left = tmp_path / ".x.safetensors.1.ab.tmp"
    for path in (left, tmp_path / "notes.tmp"):
        path.write_bytes(b"part")
    with left.open("rb") as stream:
        if locked:
            fcntl.flock(stream, fcntl.LOCK_EX)
        write_cache_file(tmp_path / "y.safetensors", "y", prepared, 1 << 20)
    assert left.exists() is locked
    assert {path.name for path in tmp_path.iterdir()} - {left.name} == {"notes.tmp", "y.safetensors"}


def test_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, prepared: PreparedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, []

    def late(stream: Any, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        lock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write_cache_file(tmp_path / "y.safetensors", "y", prepared, 1 << 20)
    assert len(swept) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["y.safetensors"]
