"""Holds the safetensors header to its rules: each with the smallest file that breaks it, and with mutated files."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from exl3_files import Raw, header_of, write_bytes, write_shard
from trellis_format.errors import FormatError, FormatNotFoundError, FormatValueError
from trellis_format.files import header as header_module
from trellis_format.files.header import DTYPE_BITS, MAX_HEADER_BYTES, FileIdentity, read_header

A = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def test_a_library_written_file_is_described(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.float32(7.0),
        "empty": np.zeros((0, 5), np.float16),
        "c": np.arange(3, dtype=np.uint8),
    }
    path = tmp_path / "x.safetensors"
    save_file({name: np.asarray(array) for name, array in arrays.items()}, path, metadata={"format": "np", "k": "v"})
    header = read_header(path)
    assert header.metadata == {"format": "np", "k": "v"}
    assert header.identity == FileIdentity.of(path.stat())
    assert header.identity.is_of(path.stat())
    for change in ({"device": -1}, {"inode": -1}, {"size": -1}, {"modified_ns": -1}):
        assert not replace(header.identity, **change).is_of(path.stat())
    data = path.read_bytes()
    for name, array in arrays.items():
        entry = header.entries[name]
        assert (entry.name, entry.shape, entry.nbytes) == (name, array.shape, array.nbytes)
        assert data[entry.begin : entry.end] == array.tobytes()
    assert {name: entry.dtype for name, entry in header.entries.items()} == {
        "a": "I16", "b": "F32", "empty": "F16", "c": "U8",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_its_size(tmp_path: Path, dtype: str) -> None:
    nbytes = 4 * 2 * DTYPE_BITS[dtype] // 8
    path = write_shard(tmp_path / "x.safetensors", {"t": Raw(dtype, (4, 2), bytes(nbytes))})
    assert read_header(path).entries["t"].nbytes == nbytes
    short = write_shard(tmp_path / "y.safetensors", {"t": Raw(dtype, (4, 2), bytes(nbytes - 1))})
    with pytest.raises(FormatValueError, match=rf"span {nbytes - 1} bytes; {dtype} \[4, 2\] needs {nbytes}"):
        read_header(short)


def test_a_file_without_tensors_is_sound(tmp_path: Path) -> None:
    assert read_header(write_bytes(tmp_path / "x", {})).entries == {}
    assert read_header(write_bytes(tmp_path / "y", b'{"__metadata__": {}}   ')).metadata == {}


def test_order_in_the_header_need_not_be_order_in_the_file(tmp_path: Path) -> None:
    header = {"late": A | {"data_offsets": [2, 4]}, "early": A}
    assert (
        read_header(write_bytes(tmp_path / "x", header, bytes(4))).entries["late"].end
        == (tmp_path / "x").stat().st_size
    )


BROKEN: dict[str, tuple[object, bytes, str]] = {
    "not an object": ([], b"", "header must be a JSON object, got list"),
    "not json": (b"{nonsense", b"", "not JSON"),
    "one byte": (b"{", b"", "too short for a JSON object"),
    "not utf-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "duplicate tensor": (
        b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": {}}',
        b"\0",
        "duplicate key 'a'",
    ),
    "metadata is no object": ({"__metadata__": None}, b"", "__metadata__ must map strings to strings"),
    "metadata value is no string": ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map strings to strings"),
    "entry is no object": ({"a": [1]}, b"", "exactly dtype, shape and data_offsets"),
    "entry lacks a key": ({"a": {"dtype": "U8", "shape": [2]}}, bytes(2), "exactly dtype, shape and data_offsets"),
    "entry has a key too many": ({"a": A | {"strides": [1]}}, bytes(2), "exactly dtype, shape and data_offsets"),
    "unknown dtype": ({"a": A | {"dtype": "U9"}}, bytes(2), "unknown dtype 'U9'"),
    "dtype is no string": ({"a": A | {"dtype": 8}}, bytes(2), "unknown dtype '8'"),
    "shape is no list": ({"a": A | {"shape": 2}}, bytes(2), "shape must be at most 16 integers"),
    "negative size": ({"a": A | {"shape": [-2]}}, bytes(2), "shape must be"),
    "two negative sizes": ({"a": A | {"shape": [-1, -2]}}, bytes(2), "shape must be"),
    "size is a float": ({"a": A | {"shape": [2.0]}}, bytes(2), "shape must be"),
    "size is a bool": ({"a": A | {"shape": [True, 2]}}, bytes(2), "shape must be"),
    "too many axes": ({"a": A | {"shape": [1] * 17}}, bytes(2), "shape must be at most 16"),
    "size beyond 2^62": ({"a": A | {"shape": [2**63]}}, bytes(2), "shape must be"),
    "product beyond 64 bits": ({"a": A | {"shape": [2**40, 2**40]}}, bytes(2), "below 2\\^62"),
    "product overflows to the size": ({"a": A | {"shape": [2**32, 2**32, 2**32]}}, bytes(2), "below 2\\^62"),
    "offsets are no pair": ({"a": A | {"data_offsets": [0, 1, 2]}}, bytes(2), "data_offsets must be two integers"),
    "offset is a string": ({"a": A | {"data_offsets": ["0", 2]}}, bytes(2), "data_offsets must be two integers"),
    "negative offset": ({"a": A | {"data_offsets": [-2, 0]}}, bytes(2), "data_offsets must be two integers"),
    "end before begin": ({"a": A | {"data_offsets": [2, 0]}}, bytes(2), r"\[2, 0\] span -2 bytes; U8 \[2\] needs 2"),
    "span too long": ({"a": A | {"data_offsets": [0, 3]}}, bytes(3), r"\[0, 3\] span 3 bytes; U8 \[2\] needs 2"),
    "half a byte": ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}}, b"", "not a whole number of bytes"),
    "overlap": (
        {"a": A, "b": A | {"data_offsets": [1, 3]}},
        bytes(3),
        "b: data_offsets begin at 1, expected 2: overlaps the tensor before it",
    ),
    "same bytes twice": ({"a": A, "b": A}, bytes(2), "b: data_offsets begin at 0, expected 2: overlaps"),
    "hole": ({"a": A | {"data_offsets": [1, 3]}}, bytes(3), "begin at 1, expected 0: leaves a hole before it"),
    "beyond the file": ({"a": A}, b"\0", "truncated: tensors end at byte"),
    "bytes behind the last tensor": ({"a": A}, bytes(3), "trailing bytes: tensors end at byte"),
    "bytes without tensors": ({}, b"\0", "trailing bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_with_the_smallest_file_that_breaks_it(tmp_path: Path, case: str) -> None:
    header, data, text = BROKEN[case]
    path = write_bytes(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatValueError, match=text) as caught:
        read_header(path)
    assert caught.value.file == str(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("case", ["unknown dtype", "negative size", "span too long", "overlap", "hole"])
def test_rules_of_one_tensor_name_it(tmp_path: Path, case: str) -> None:
    header, data, _ = BROKEN[case]
    with pytest.raises(FormatValueError) as caught:
        read_header(write_bytes(tmp_path / "x", header, data))
    assert caught.value.tensor == ("b" if case == "overlap" else "a")


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_the_length_field(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(size))
    with pytest.raises(FormatValueError, match=f"{size} bytes: too short for a safetensors header length"):
        read_header(path)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (0, "header of 0 bytes is too short"),
        (3, r"truncated: header of 3 bytes at offset 8 in a file of 10 bytes"),
        (MAX_HEADER_BYTES + 1, f"header of {MAX_HEADER_BYTES + 1} bytes exceeds the bound of {MAX_HEADER_BYTES}"),
        (2**63, "exceeds the bound"),
        (2**64 - 1, "exceeds the bound"),
    ],
)
def test_a_header_length_that_cannot_be(tmp_path: Path, length: int, text: str) -> None:
    path = write_bytes(tmp_path / "x", b"{}", length=length)
    tracemalloc.start()
    try:
        with pytest.raises(FormatValueError, match=text):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, "nothing may be allocated for a header that is not there"


def test_huge_declared_tensors_allocate_nothing(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F16", "shape": [2**30, 2**29], "data_offsets": [0, 2**60]}}
    path = write_bytes(tmp_path / "x", header)
    tracemalloc.start()
    try:
        with pytest.raises(FormatValueError, match="truncated"):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("count", [20, 21])
def test_a_header_of_very_many_tensors_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(header_module, "MAX_TENSORS", 20)
    header = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
    path = write_bytes(tmp_path / "x", header)
    if count == 20:
        assert len(read_header(path).entries) == 20
        return
    monkeypatch.setattr(header_module, "parse_json", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(FormatValueError, match="header of 21 tensors exceeds the bound of 20 of a shard") as caught:
        read_header(path)
    assert caught.value.numbers == {"observed": 21, "limit": 20}


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match=r"none\.safetensors: no such file"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(FormatValueError, match="not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatValueError, match="not a regular file"):
        read_header(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FormatValueError, match="cannot be opened"):
        read_header(tmp_path / "loop")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    sound = write_bytes(tmp_path / "sound", {"a": A}, bytes(2))
    broken = write_bytes(tmp_path / "broken", b"[", b"")
    before = len(os.listdir("/proc/self/fd"))
    read_header(sound)
    with pytest.raises(FormatValueError):
        read_header(broken)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bytes(tmp_path / "x", {"a": A}, bytes(2))
    size = path.stat().st_size
    real = os.fstat

    def longer(descriptor: int) -> os.stat_result:
        path.write_bytes(path.read_bytes()[:20])
        status = list(real(descriptor))
        status[6] = size
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", longer)
    with pytest.raises(FormatValueError, match=r"truncated: header of .* bytes, 12 read"):
        read_header(path)


def test_reading_errors_are_format_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bytes(tmp_path / "x", {"a": A}, bytes(2))

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdopen", fail)
    with pytest.raises(FormatValueError, match="cannot be read: Input/output error"):
        read_header(path)


def _mutate_entry(key: str, value: object) -> Callable[[dict[str, Any], str], None]:
    def change(header: dict[str, Any], name: str) -> None:
        header[name][key] = value

    return change


SIZES = st.integers(-3, 2**64) | st.sampled_from([0, 1, 2**31, 2**62, 2**63 - 1])
ODD = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3) | st.lists(SIZES, max_size=3)
CHANGES = st.one_of(
    st.builds(_mutate_entry, st.just("shape"), st.lists(SIZES, max_size=5) | ODD),
    st.builds(_mutate_entry, st.just("data_offsets"), st.lists(SIZES, max_size=3) | ODD),
    st.builds(_mutate_entry, st.just("dtype"), st.sampled_from([*DTYPE_BITS, "f16", ""]) | ODD),
    st.builds(_mutate_entry, st.text(max_size=6), ODD),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_mutated_headers_raise_format_errors_or_stay_consistent(tmp_path: Path, data: st.DataObject) -> None:
    tensors = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.zeros(4, np.float16), "c": np.uint8(3)}
    header, payload = header_of({name: np.asarray(array) for name, array in tensors.items()})
    mutated = copy.deepcopy(header)
    for _ in range(data.draw(st.integers(0, 2))):
        data.draw(CHANGES)(mutated, data.draw(st.sampled_from(sorted(tensors))))
    encoded = bytearray(json.dumps(mutated).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(encoded)))
        encoded[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    payload = payload[: data.draw(st.integers(len(payload) - 2, len(payload)))] + bytes(data.draw(st.integers(0, 1)))
    length = data.draw(st.just(len(encoded)) | st.integers(0, 2**64 - 1))
    path = write_bytes(tmp_path / "x.safetensors", bytes(encoded), payload, length=length)
    try:
        parsed = read_header(path)
    except FormatError:
        return
    position = 8 + length
    for entry in sorted(parsed.entries.values(), key=lambda entry: (entry.begin, entry.end)):
        assert entry.begin == position
        assert entry.nbytes * 8 == math.prod(entry.shape) * DTYPE_BITS[entry.dtype]
        position = entry.end
    assert position == path.stat().st_size


@given(data=st.binary(max_size=64))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_refused_or_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    try:
        header = read_header(path)
    except FormatValueError:
        return
    assert sum(entry.nbytes for entry in header.entries.values()) == len(data) - 8 - struct.unpack("<Q", data[:8])[0]
