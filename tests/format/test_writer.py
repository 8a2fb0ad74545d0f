"""Holds written shards to what safetensors and this package read, and directories to being whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from exl3_files import Raw
from exl3_files import write_shard as write_raw
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.writer import (
    OutputDirectory,
    PlannedTensor,
    deal_shards,
    index_object,
    of_array,
    of_file,
    shard_name,
    write_json,
    write_shard,
)

JOURNAL = ".trellis-progress.json"
DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "float64"]


def planned(name: str, nbytes: int, *pieces: int) -> PlannedTensor:
    def chunks() -> Iterator[npt.NDArray[np.uint8] | int]:
        for piece in pieces:
            yield np.full(piece, 7, dtype=np.uint8)

    return PlannedTensor(name, "U8", (nbytes,), chunks)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrays = {}
    for number in range(data.draw(st.integers(0, 5))):
        shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = data.draw(st.sampled_from(DTYPES))
        arrays[f"t{number}"] = rng.integers(0, 2, shape).astype(dtype) * rng.integers(0, 2, shape).astype(dtype)
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    size = write_shard(path, [of_array(name, array) for name, array in arrays.items()], metadata={"a": "b"})
    assert size == path.stat().st_size
    found = load_file(path)
    assert sorted(found) == sorted(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"a": "b"}
    assert set(read_header(path).entries) == set(arrays)
    assert os.listdir(path.parent) == [path.name]


def test_views_and_foreign_byte_orders_are_written_by_value(tmp_path: Path) -> None:
    array = np.arange(24, dtype=">i4").reshape(4, 6)[::2, ::-1]
    write_shard(tmp_path / "x.safetensors", [of_array("a", array)])
    assert np.array_equal(load_file(tmp_path / "x.safetensors")["a"], array)


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    tensors = [np.zeros(3, np.uint8), np.zeros(3, np.float16), np.zeros(1, np.float64), np.zeros((), np.int32)]
    path = tmp_path / "x.safetensors"
    write_shard(path, [of_array(str(number), array) for number, array in enumerate(tensors)])
    for entry in read_header(path).entries.values():
        assert entry.begin % tensors[int(entry.name)].itemsize == 0


def test_copies_keep_bytes_that_numpy_cannot_type(tmp_path: Path) -> None:
    source = write_raw(tmp_path / "a.safetensors", {"w": Raw("BF16", (3, 2), bytes(range(12)))})
    reader = ShardReader(read_header(source))
    tensor = FileArray(reader, reader.header.entries["w"])
    write_shard(tmp_path / "b.safetensors", [of_file(tensor, "other")])
    copied = read_header(tmp_path / "b.safetensors").entries["other"]
    assert (copied.dtype, copied.shape) == ("BF16", (3, 2))
    assert (tmp_path / "b.safetensors").read_bytes()[copied.begin :] == bytes(range(12))


def test_holes_read_as_zeros_and_take_no_room(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "x.safetensors", 64 << 20
    hole = PlannedTensor("hole", "U8", (nbytes,), lambda: iter([nbytes]))
    write_shard(path, [of_array("a", np.ones(3, np.uint8)), hole])
    assert path.stat().st_size > nbytes
    assert path.stat().st_blocks * 512 < nbytes // 8
    header = read_header(path)
    box = np.full(1000, 9, dtype=np.uint8)
    FileArray(ShardReader(header), header.entries["hole"]).read_box((slice(nbytes - 1000, nbytes),), box)
    assert not box.any()


@pytest.mark.parametrize("pieces", [(), (3, 3), (8,), (7, 1), (9,)])
def test_plans_that_give_other_bytes_than_they_need_leave_nothing(tmp_path: Path, pieces: tuple[int, ...]) -> None:
    with pytest.raises(FormatValueError, match=r"x.safetensors: t: U8 \[7\] needs 7 bytes, the plan gave"):
        write_shard(tmp_path / "x.safetensors", [planned("t", 7, *pieces)])
    assert os.listdir(tmp_path) == []


def scattered(*pieces: tuple[int, int]) -> PlannedTensor:
    """10 bytes, of which pieces of (offset, length) are ones."""
    return PlannedTensor(
        "s", "U8", (10,), pieces=lambda: iter([(offset, np.ones(length, np.uint8)) for offset, length in pieces])
    )


def test_pieces_lie_where_they_say_between_zeros(tmp_path: Path) -> None:
    told: list[int] = []
    tensors = [planned("a", 3, 3), scattered((7, 2), (1, 3)), planned("b", 2, 2)]
    write_shard(tmp_path / "x.safetensors", tensors, on_bytes=told.append)
    found = load_file(tmp_path / "x.safetensors")
    assert found["s"].tolist() == [0, 1, 1, 1, 0, 0, 0, 1, 1, 0]
    assert (found["a"].tolist(), found["b"].tolist()) == ([7, 7, 7], [7, 7])
    assert told == [3, 2, 3, 5, 2]


@pytest.mark.parametrize("pieces", [((8, 3),), ((-1, 2),), ((0, 6), (0, 6)), ((0, 11),)])
def test_pieces_beyond_their_tensor_are_refused(tmp_path: Path, pieces: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(FormatValueError, match=r"s: the plan has \d+ bytes at -?\d+, beyond the 10 bytes of U8 \[10\]"):
        write_shard(tmp_path / "x.safetensors", [scattered(*pieces)])
    assert os.listdir(tmp_path) == []


def test_each_piece_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    write_shard(tmp_path / "x.safetensors", [planned("t", 7, 3, 4), planned("u", 2, 2)], on_bytes=told.append)
    assert told == [3, 4, 2]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="t: two tensors of one shard have this name"):
        write_shard(tmp_path / "x.safetensors", [planned("t", 1, 1), planned("t", 1, 1)])


def test_dtypes_that_safetensors_lacks_are_refused() -> None:
    with pytest.raises(FormatTypeError, match="dtype complex128 has no safetensors dtype"):
        of_array("a", np.zeros(1, np.complex128))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="cannot be written: No such file"):
        write_shard(tmp_path / "no" / "x.safetensors", [planned("t", 1, 1)])


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 12))
def test_shards_are_runs_and_none_is_empty_or_much_too_large(sizes: list[int], count: int) -> None:
    tensors = [planned(str(number), size) for number, size in enumerate(sizes)]
    dealt = deal_shards(tensors, count)
    assert [tensor for shard in dealt for tensor in shard] == tensors
    assert len(dealt) <= count
    assert not sizes or all(dealt)
    share = sum(sizes) / count
    assert all(sum(tensor.nbytes for tensor in shard) <= share + max(sizes, default=0) for shard in dealt)


@pytest.mark.parametrize("count", [0, -1])
def test_shards_are_counted_from_one(count: int) -> None:
    with pytest.raises(FormatValueError, match=f"{count} shards: at least 1 is needed"):
        deal_shards([], count)


def test_names_and_index() -> None:
    assert shard_name(0, 1) == "model.safetensors"
    assert shard_name(1, 12) == "model-00002-of-00012.safetensors"
    shards = {"a": [planned("x", 3)], "b": [planned("y", 4), planned("z", 0)]}
    assert index_object(shards) == {"metadata": {"total_size": 7}, "weight_map": {"x": "a", "y": "b", "z": "b"}}


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with OutputDirectory(out, fingerprint="f") as directory:
        directory.write_json("a.json", {"b": 1})
        assert directory.has("a.json")
        assert not directory.has("c.json")
        assert not out.exists()
    assert json.loads((out / "a.json").read_text()) == {"b": 1}
    assert os.listdir(out) == ["a.json"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_directory_may_be_there_already(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
        directory.write_bytes("a", b"x")
    assert (tmp_path / "out" / "a").read_bytes() == b"x"


def test_a_directory_with_content_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("here")
    with pytest.raises(FormatValueError, match="already exists; name a directory that does not"):
        OutputDirectory(tmp_path, fingerprint="f").__enter__()
    with pytest.raises(FormatValueError, match="already exists"):
        OutputDirectory(tmp_path / "kept", fingerprint="f").__enter__()
    assert (tmp_path / "kept").read_text() == "here"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")  # a rename would put the directory in the link's place
    with pytest.raises(FormatValueError, match="already exists"):
        OutputDirectory(tmp_path / "link", fingerprint="f").__enter__()


def write_and_fail(directory: OutputDirectory) -> None:
    directory.write_bytes("a", b"x")
    raise RuntimeError


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
        write_and_fail(directory)
    assert os.listdir(tmp_path) == []


def test_a_resumable_directory_keeps_its_complete_files_for_the_same_content_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), OutputDirectory(out, fingerprint="f", resumable=True) as directory:
        write_and_fail(directory)
    assert not out.exists()
    with pytest.raises(FormatValueError, match=r"\.out\.partial is left from another conversion; remove it"):
        OutputDirectory(out, fingerprint="g", resumable=True).__enter__()
    with OutputDirectory(out, fingerprint="f", resumable=True) as directory:
        assert directory.has("a")
    assert os.listdir(out) == ["a"]


def test_what_a_killed_writer_left_is_cleared_unless_it_can_be_resumed(tmp_path: Path) -> None:
    stale = tmp_path / ".out.partial"
    stale.mkdir()
    (stale / JOURNAL).write_text('{"fingerprint": "g"}')
    (stale / "model.safetensors").write_text("half")
    with OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
        assert not directory.has("model.safetensors")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("resumable", [True, False])
def test_files_that_no_journal_vouches_for_are_neither_taken_nor_removed(tmp_path: Path, resumable: bool) -> None:
    stale = tmp_path / ".out.partial"
    stale.mkdir()
    (stale / "model.safetensors").write_text("foreign")
    for journal in (None, tmp_path / "elsewhere"):
        if journal is not None:
            journal.write_text('{"fingerprint": "f"}')
            (stale / JOURNAL).symlink_to(journal)
        with pytest.raises(FormatValueError, match=r"\.out\.partial holds '.*' but no journal"):
            OutputDirectory(tmp_path / "out", fingerprint="f", resumable=resumable).__enter__()
    assert (stale / "model.safetensors").read_text() == "foreign"
    for name in (JOURNAL, "model.safetensors"):
        (stale / name).unlink()
    with OutputDirectory(tmp_path / "out", fingerprint="f", resumable=resumable):
        assert (stale / JOURNAL).is_file()


@pytest.mark.parametrize("resumable", [True, False])
def test_a_partial_directory_that_is_a_link_is_not_followed(tmp_path: Path, resumable: bool) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("here")
    partial = tmp_path / ".out.partial"
    for make in (lambda: partial.symlink_to(victim), lambda: partial.symlink_to("nowhere"), partial.touch):
        make()
        with pytest.raises(FormatValueError, match=r"\.out\.partial is in the way: it must be a directory"):
            OutputDirectory(tmp_path / "out", fingerprint="f", resumable=resumable).__enter__()
        partial.unlink()
    assert [path.name for path in victim.iterdir()] == ["kept"]


def test_a_folder_in_what_was_left_is_named(tmp_path: Path) -> None:
    stale = tmp_path / ".out.partial"
    (stale / "folder").mkdir(parents=True)
    (stale / JOURNAL).write_text('{"fingerprint": "g"}')
    (stale / "a").write_text("x")
    with pytest.raises(FormatValueError, match="holds a folder 'folder', which no writer makes"):
        OutputDirectory(tmp_path / "out", fingerprint="f").__enter__()
    assert (stale / "a").read_text() == "x"


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
        with pytest.raises(FormatValueError, match="another process is writing it"):
            OutputDirectory(tmp_path / "out", fingerprint="f").__enter__()
        directory.write_bytes("a", b"x")
    assert (tmp_path / "out" / "a").exists()


def test_what_cannot_be_written_is_an_error_of_this_package(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatValueError, match="cannot be written"):
        OutputDirectory(tmp_path / "file" / "out", fingerprint="f").__enter__()
    with pytest.raises(FormatValueError, match="root directory"):
        OutputDirectory("/", fingerprint="f")
    with (
        OutputDirectory(tmp_path / "out", fingerprint="f") as directory,
        pytest.raises(FormatValueError, match="cannot be written"),
    ):
        directory.write_bytes("no/a", b"x")


def test_json_replaces_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"é": [1, None]})
    assert path.read_bytes() == b'{\n  "\\u00e9": [\n    1,\n    null\n  ]\n}\n'
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": object()})
    with pytest.raises(FormatValueError, match="cannot be written: No such file") as caught:
        write_json(tmp_path / "no" / "a.json", {})
    assert caught.value.file == str(tmp_path / "no" / "a.json")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])
