"""Holds the opening of a checkpoint folder to its rules: shards, index and configurations against each other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from exl3_files import random_linear, write_bytes, write_checkpoint, write_json, write_shard
from trellis_format import checkpoint as module
from trellis_format.checkpoint import CONFIG_NAME, INDEX_NAME, QUANTIZATION_CONFIG_NAME, open_checkpoint
from trellis_format.errors import FormatError, FormatNotFoundError, FormatValueError

ARRAYS = {f"t{number}": np.full((number + 1, 3), number, np.int16) for number in range(5)}


def test_every_tensor_of_every_shard_is_found_and_nothing_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, shards=3, index=True, config={"a": 1}, quantization={"b": 2})
    with open_checkpoint(folder) as opened:
        assert (opened.path, opened.config, opened.quantization_config) == (folder, {"a": 1}, {"b": 2})
        assert sorted(opened.tensors) == sorted(ARRAYS)
        assert opened.nbytes == sum(array.nbytes for array in ARRAYS.values())
        assert opened.bytes_read == 0
        assert len(opened.readers) == 3
        for name, array in ARRAYS.items():
            assert np.array_equal(opened.tensors[name].read(), array)
        assert opened.bytes_read == opened.nbytes
        assert opened.notes == ()


def test_a_folder_may_be_given_as_text_and_lack_everything_but_a_shard(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    opened = open_checkpoint(str(folder))
    assert (opened.config, opened.quantization_config) == (None, None)
    assert len(opened.tensors) == 5


def test_leaving_the_context_closes_the_shards(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, shards=2)
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(folder) as opened:
        for tensor in opened.tensors.values():
            tensor.read()
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match="no such checkpoint directory"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(FormatValueError, match=r"no \*\.safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FormatValueError, match="this is a file"):
        open_checkpoint(tmp_path / "file")


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(FormatValueError, match="cannot be listed: Permission denied"):
        open_checkpoint(tmp_path)


def test_the_number_of_shards_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, shards=3)
    monkeypatch.setattr(module, "MAX_SHARDS", 2)
    with pytest.raises(FormatValueError, match="3 shards exceed the bound of 2"):
        open_checkpoint(folder)


def test_two_shards_with_one_tensor(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"x": ARRAYS["t0"]})
    write_shard(tmp_path / "b.safetensors", {"x": ARRAYS["t1"]})
    with pytest.raises(FormatValueError, match=r"b\.safetensors: x: duplicate tensor: also in a\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, shards=2)
    broken = write_bytes(folder / "model-00002-of-00002.safetensors", {"x": []})
    with pytest.raises(FormatValueError) as caught:
        open_checkpoint(folder)
    assert (caught.value.file, caught.value.tensor) == (str(broken), "x")


def index_of(folder: Path, **mapping: str) -> Path:
    return write_json(folder / INDEX_NAME, {"weight_map": mapping})


def test_an_index_that_lists_what_no_shard_has(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    index_of(folder, **dict.fromkeys([*ARRAYS, "ghost", "spook"], "model.safetensors"))
    with pytest.raises(FormatValueError) as caught:
        open_checkpoint(folder)
    assert str(caught.value) == (
        f"{folder / INDEX_NAME}: the index and the shards disagree: 2 tensors are listed in the index but not in that "
        "shard (first ghost, spook), 0 are in a shard but not listed; --ignore-index (ignore_index=True) trusts the "
        "shards"
    )
    assert len(open_checkpoint(folder, ignore_index=True).tensors) == 5


def test_an_index_that_hides_tensors_of_a_shard(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    index_of(folder, t0="model.safetensors")
    with pytest.raises(
        FormatValueError, match=r"0 tensors are listed .* 4 are in a shard but not listed \(first t1, t2, t3\)"
    ):
        open_checkpoint(folder)


def test_an_index_that_names_the_wrong_shard_counts_in_both_directions(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, shards=2, index=True)
    first, second = sorted(path.name for path in folder.glob("*.safetensors"))
    index_of(folder, t0=second, t1=first, t2=first, t3=second, t4=second)
    with pytest.raises(FormatValueError, match=r"1 tensors are listed .*\(first t0\), 1 are in a shard .*\(first t0\)"):
        open_checkpoint(folder)


def test_an_empty_index_hides_everything(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"x.trellis": ARRAYS["t0"]})
    index_of(folder)
    with pytest.raises(FormatValueError, match=r"0 tensors are listed .* 1 are in a shard but not listed"):
        open_checkpoint(folder)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, shards=2, index=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatNotFoundError, match=r"names 1 shards .* first 'model-00002-of-00002\.safetensors'"):
        open_checkpoint(folder)
    assert len(open_checkpoint(folder, ignore_index=True).tensors) == 3


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "a/b.safetensors",
        "",
        ".",
        "..",
        "x.bin",
        "a\\b.safetensors",
        "/etc/x.safetensors",
        "x\0.safetensors",
    ],
)
def test_shards_lie_in_the_folder_itself(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    index_of(folder, t0=name)
    with pytest.raises(FormatValueError, match="shards must be \\*\\.safetensors files of the directory itself"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}])
def test_an_index_maps_names_to_names(tmp_path: Path, value: object) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    write_json(folder / INDEX_NAME, value)
    with pytest.raises(FormatValueError, match="weight_map must map tensor names to file names"):
        open_checkpoint(folder)
    assert len(open_checkpoint(folder, ignore_index=True).tensors) == 5


def test_a_shard_that_the_index_leaves_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, index=True)
    write_shard(folder / "consolidated.safetensors", {"t0": ARRAYS["t0"]})
    opened = open_checkpoint(folder)
    text = f"consolidated.safetensors is not in {INDEX_NAME}, whose shards hold each of its tensors: not read"
    assert opened.notes == (text,)
    assert len(opened.readers) == 1


def test_a_shard_that_the_index_leaves_out_cannot_add_a_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, index=True)
    write_shard(folder / "consolidated.safetensors", {"t0": ARRAYS["t0"], "x": ARRAYS["t0"]})
    with pytest.raises(FormatValueError, match=r"duplicate tensor: also in model\.safetensors"):
        open_checkpoint(folder)
    write_shard(folder / "consolidated.safetensors", {"x": ARRAYS["t0"]})
    with pytest.raises(FormatValueError, match=r"1 are in a shard but not listed \(first x\); --ignore-index"):
        open_checkpoint(folder)
    assert "x" in open_checkpoint(folder, ignore_index=True).tensors


def test_an_empty_index_lists_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    index_of(folder)
    with pytest.raises(FormatValueError, match="5 are in a shard but not listed"):
        open_checkpoint(folder)


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, index=True)
    (folder / "._model.safetensors").write_bytes(b"resource fork")
    opened = open_checkpoint(folder)
    assert len(opened.tensors) == len(ARRAYS)
    assert opened.notes == ("._model.safetensors is hidden: not read",)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatValueError, match=r"no \*\.safetensors file"):
        open_checkpoint(folder, ignore_index=True)


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "dangling"])
def test_an_index_that_is_no_file(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    index = folder / INDEX_NAME
    if kind == "directory":
        index.mkdir()
    elif kind == "pipe":
        os.mkfifo(index)
    else:
        index.symlink_to("/dev/zero" if kind == "device" else folder / "nowhere")
    with pytest.raises(FormatError, match=r"not a regular file|a link to a file that is not there") as caught:
        open_checkpoint(folder)
    assert caught.value.file == str(index)


def test_a_stale_index_cannot_hide_a_trellis(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS, index=True)
    write_shard(folder / "extra.safetensors", random_linear(np.random.default_rng(0), "x", 128, 128))
    with pytest.raises(FormatValueError, match=r"4 are in a shard but not listed \(first x\.trellis"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", [CONFIG_NAME, QUANTIZATION_CONFIG_NAME, INDEX_NAME])
@pytest.mark.parametrize(("text", "message"), [("[]", "must hold a JSON object, got list"), ("{", "not JSON")])
def test_configurations_are_json_objects(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = write_checkpoint(tmp_path / "c", ARRAYS)
    (folder / name).write_text(text)
    with pytest.raises(FormatValueError, match=message) as caught:
        open_checkpoint(folder)
    assert caught.value.file == str(folder / name)


def test_real_checkpoints_open_without_reading_data(checkpoint_path: Path) -> None:
    with open_checkpoint(checkpoint_path) as opened:
        assert opened.config is not None
        assert opened.quantization_config is not None
        assert opened.bytes_read == 0
        assert set(opened.tensors) >= {
            name for entry in opened.quantization_config["tensor_storage"].values() for name in entry["stored_tensors"]
        }
