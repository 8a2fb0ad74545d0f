"""Holds the JSON parser to its bounds, with input that a stranger might write."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.errors import FormatError, FormatNotFoundError, FormatValueError
from trellis_format.files import strict_json
from trellis_format.files.strict_json import MAX_JSON_DEPTH, parse_json, read_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | TEXT
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_json_writes_is_read_back(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_format_error(data: bytes) -> None:
    try:
        parse_json(data)
    except FormatError:
        return
    json.loads(data.decode())


@given(st.data())
def test_mutated_json_gives_a_value_or_a_format_error(data: st.DataObject) -> None:
    text = bytearray(json.dumps(data.draw(VALUES)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        value = parse_json(bytes(text))
    except FormatValueError:
        return
    assert value == json.loads(text)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1,]", "not JSON"),
        (b"{} {}", "not JSON: Extra data"),
        (b"\xff{}", "not UTF-8 at byte 0"),
        (b'["\xc3"]', "not UTF-8 at byte 2"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "duplicate key 'a'"),
        (b'[{"x": {"k": 1, "k": 1}}]', "duplicate key 'k'"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate key 'a'"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"[1e999]", "1e999 is beyond float64"),
        (b"[18446744073709551616]", "integer 18446744073709551616 is beyond 64 bits"),
        (b"[-9223372036854775809]", "is beyond 64 bits"),
        (b"[" + b"9" * 5000 + b"]", "is beyond 64 bits"),
        (b"[0." + b"1" * 5000 + b"]", "is beyond float64"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": [{"b": "x\\uDBFFy"}]}', "half of a surrogate pair"),
        (b'["a\nb"]', "not JSON: Invalid control character"),
    ],
)
def test_what_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(FormatValueError, match=text) as caught:
        parse_json(data, file="some/config.json")
    assert str(caught.value).startswith("some/config.json: ")
    assert len(str(caught.value)) < 300


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_json(b'{"\\ud83d\\ude00": ["\\\\ud800"]}') == {"\U0001f600": ["\\ud800"]}


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_depth_is_bounded(brackets: str) -> None:
    opening, closing = (brackets[0], "]") if brackets == "[]" else ('{"a":', "}")

    def nested(depth: int) -> bytes:
        core = "1" if brackets == "{}" else ""
        return (opening * depth + core + closing * depth).encode()

    value = parse_json(nested(MAX_JSON_DEPTH))
    for _ in range(MAX_JSON_DEPTH - 1):
        value = value[0] if brackets == "[]" else value["a"]
    with pytest.raises(FormatValueError, match=f"nests {MAX_JSON_DEPTH + 1} deep, at most {MAX_JSON_DEPTH}"):
        parse_json(nested(MAX_JSON_DEPTH + 1))
    with pytest.raises(FormatValueError, match="nests 100000 deep"):
        parse_json(nested(100_000))


def test_brackets_in_strings_are_no_depth() -> None:
    text = "[{" * 500 + '\\"' + "\\\\"
    value = parse_json(f'["{text}", {{"{text}x": []}}]'.encode())
    assert len(value[0]) == 1000 + 2


@pytest.mark.parametrize(
    "data",
    [b'["' + b"\\n" * 2_000_000 + b'"]' + b"[" * 100, b"[" * 100 + b'\\"' * 2_000_000, b'"' + b"\\" * 4_000_000],
)
def test_scanning_strings_takes_bounded_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatValueError):
            parse_json(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data)


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_JSON_VALUES", 100)
    assert len(parse_json(b"[" + b"1," * 98 + b"1]")) == 99
    with pytest.raises(FormatValueError, match="up to 101 values exceeds the bound of 100"):
        parse_json(b"[" + b"1," * 100 + b"1]")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"näme": [1, 2.5]}', encoding="utf-8")
    assert read_json(path) == {"näme": [1, 2.5]}
    assert read_json(str(path), max_bytes=path.stat().st_size) == {"näme": [1, 2.5]}
    with pytest.raises(FormatValueError, match=r"config\.json: JSON of 19 bytes exceeds the bound of 18 bytes"):
        read_json(path, max_bytes=18)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"[1")
    with pytest.raises(FormatValueError) as caught:
        read_json(path)
    assert caught.value.file == str(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match=r"nothing\.json: no such file"):
        read_json(tmp_path / "nothing.json")
    with pytest.raises(FormatValueError, match="not a regular file but a directory"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FormatValueError, match="not a regular file but a device or pipe"):
        read_json(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(FormatValueError, match="not a regular file but a device or pipe"):
        read_json(tmp_path / "zero.json")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing.json")
    with pytest.raises(FormatNotFoundError, match=r"dangling\.json: a link to a file that is not there"):
        read_json(tmp_path / "dangling.json")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"a": "x\ny"}', "not JSON: Invalid control character at byte 8"),
        (b'{"a": "x', "not JSON: Unterminated string starting at byte 6"),
        (b'{"a": "\\q"}', r"not JSON: Invalid \escape at byte 7"),
    ],
)
def test_a_fault_is_told_with_its_byte(data: bytes, text: str) -> None:
    with pytest.raises(FormatValueError) as caught:
        parse_json(data)
    assert str(caught.value) == text


def test_places_are_bytes_and_not_characters() -> None:
    with pytest.raises(FormatValueError, match=r"at byte 11$"):
        parse_json('{"äö":   x}'.encode())


def test_an_unreadable_file_is_a_format_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FormatValueError, match=r"x\.json: cannot be read: Permission denied"):
        read_json(path)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1, 2, 3]")
    status = os.stat_result((0o100644, 1, 1, 1, 0, 0, 4, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    with pytest.raises(FormatValueError, match="grew beyond its 4 bytes"):
        read_json(path, max_bytes=5)
