"""Owns the parse of JSON that a stranger wrote: bounded in bytes and depth, duplicate keys refused.

It must not know what the JSON means.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trellis_format.errors import FormatError, FormatNotFoundError, FormatValueError

__all__ = ["MAX_JSON_BYTES", "MAX_JSON_DEPTH", "parse_json", "read_json"]

MAX_JSON_BYTES = 256 << 20
"""Largest JSON file that is read, in bytes; the largest published index is under 20 MiB."""
MAX_JSON_DEPTH = 64
"""Deepest nesting that is parsed."""
MAX_JSON_VALUES = 16_000_000
"""Most values that are parsed, counted as commas and brackets, strings included: each may cost a Python object."""
MAX_NUMBER_CHARACTERS = 64
"""Longest number that is parsed."""

# Possessive, and with an optional end, so that no input makes the scan go back.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A number that may leave 64 bits or float64, inside a string too: such text takes the careful path.
_LONG_NUMBERS = (b"0" * 19, b"0e")
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level down, one level up, as int8
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{]}")] = (1, 1, -1, -1)
_SCAN_BYTES = 1 << 18  # of one step of a scan, which then stays in cache
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read and parse a JSON file.

    Args:
        path: the file.
        max_bytes: bound on its size, in bytes.

    Raises:
        FormatNotFoundError: if there is no such file.
        FormatValueError: if it is not a regular file, is larger than the bound, or breaks a rule of `parse_json`.
    """
    file = Path(path)
    try:
        if not file.is_file():  # before it is opened: a pipe would wait, a device never end
            raise _not_a_file(file)
        size = file.stat().st_size
        if size > max_bytes:
            raise FormatValueError(f"JSON of {size} bytes exceeds the bound of {max_bytes} bytes", file=file)
        with file.open("rb") as stream:
            data = stream.read(size + 1)  # not the bound: a stream allocates what it is asked for
    except OSError as error:
        if isinstance(error, FormatNotFoundError):
            raise
        raise FormatValueError(f"cannot be read: {error.strerror or error}", file=file) from error
    if len(data) > size:
        raise FormatValueError(f"JSON grew beyond its {size} bytes while it was read", file=file)
    return parse_json(data, file=file)


def parse_json(data: bytes, *, file: str | os.PathLike[str] | None = None) -> Any:
    """Parse JSON bytes.

    Args:
        data: UTF-8 text.
        file: named in errors.

    Raises:
        FormatValueError: if the bytes are not UTF-8 JSON, nest deeper than `MAX_JSON_DEPTH`, hold more than
            `MAX_JSON_VALUES`, repeat a key in one object, or hold a NaN, an infinity, an integer beyond 64 bits or
            half of a surrogate pair, which no text file can hold.
    """
    simple = b"\\" not in data and not _has_long_number(data)
    pairs = _check_size(data, file, simple=simple)
    kept = _Counter()
    value = _parse(data, file, {"object_hook": kept} if simple else _careful(file))
    if simple and kept.pairs != pairs:  # the scanner keeps the last of repeated keys
        value = _parse(data, file, _careful(file))
    if _SURROGATE.search(data) and not _is_text(value):
        raise FormatValueError("a string holds half of a surrogate pair, which is not text", file=file)
    return value


def _not_a_file(file: Path) -> FormatError:
    if file.exists():
        kind = "directory" if file.is_dir() else "device or pipe"
        return FormatValueError(f"not a regular file but a {kind}", file=file)
    if file.is_symlink():
        return FormatNotFoundError("a link to a file that is not there", file=file)
    return FormatNotFoundError("no such file", file=file)


class _Counter:
    """Counts the keys of parsed objects."""

    def __init__(self) -> None:
        self.pairs = 0

    def __call__(self, parsed: dict[str, Any]) -> dict[str, Any]:
        self.pairs += len(parsed)
        return parsed


def _careful(file: str | os.PathLike[str] | None) -> dict[str, Any]:
    return {
        "object_pairs_hook": lambda pairs: _unique(pairs, file),
        "parse_int": lambda text: _bounded_int(text, file),
        "parse_float": lambda text: _bounded_float(text, file),
    }


def _has_long_number(data: bytes) -> bool:
    digits = data.translate(_DIGITS)
    return any(pattern in digits for pattern in _LONG_NUMBERS)


def _parse(data: bytes, file: str | os.PathLike[str] | None, hooks: dict[str, Any]) -> Any:
    try:
        return json.loads(data.decode("utf-8"), parse_constant=lambda text: _refuse_constant(text, file), **hooks)
    except UnicodeDecodeError as error:
        raise FormatValueError(f"not UTF-8 at byte {error.start}", file=file) from error
    except json.JSONDecodeError as error:
        fault, place = error.msg.rstrip(": ").removesuffix(" at"), len(error.doc[: error.pos].encode())
        raise FormatValueError(f"not JSON: {fault} at byte {place}", file=file) from error
    except RecursionError as error:
        raise FormatValueError(f"JSON nests deeper than {MAX_JSON_DEPTH}", file=file) from error


def _check_size(data: bytes, file: str | os.PathLike[str] | None, *, simple: bool) -> int:
    """Hold text to the bounds; returns the number of keys where the text has no backslash."""
    opening = data.count(b"{") + data.count(b"[")
    values = opening + data.count(b",")
    if values > MAX_JSON_VALUES:
        raise FormatValueError(f"JSON of up to {values} values exceeds the bound of {MAX_JSON_VALUES}", file=file)
    depth, pairs = _scan(data) if simple else (opening, 0)
    if not simple and opening > MAX_JSON_DEPTH:
        steps = np.frombuffer(_STRING.sub(b"", data).translate(_STEPS, _NOT_BRACKETS), dtype=np.int8)
        depth = int(np.max(np.cumsum(steps, dtype=np.int32))) if steps.size else 0
    if depth > MAX_JSON_DEPTH:
        raise FormatValueError(f"JSON nests {depth} deep, at most {MAX_JSON_DEPTH} is read", file=file)
    return pairs


def _scan(data: bytes) -> tuple[int, int]:
    """Deepest nesting and number of keys of text without backslashes; what follows a first fault may be miscounted."""
    level = deepest = pairs = 0
    inside = False
    for begin in range(0, len(data), _SCAN_BYTES):
        block = np.frombuffer(data, dtype=np.uint8, count=min(_SCAN_BYTES, len(data) - begin), offset=begin)
        within = np.logical_xor.accumulate(block == ord('"'))
        outside = within if inside else ~within
        inside ^= bool(within[-1])
        pairs += int(np.count_nonzero((block == ord(":")) & outside))
        steps = _STEP[block]
        levels = level + np.cumsum(steps[(steps != 0) & outside], dtype=np.int64)
        if levels.size:
            deepest, level = max(deepest, int(np.max(levels))), int(levels[-1])
    return deepest, pairs


def _is_text(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_text(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(_is_text, value))
    return not isinstance(value, str) or not any("\ud800" <= character <= "\udfff" for character in value)


def _unique(pairs: list[tuple[str, Any]], file: str | os.PathLike[str] | None) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise FormatValueError(f"duplicate key {repeated!r}", file=file)
    return result


def _refuse_constant(text: str, file: str | os.PathLike[str] | None) -> Any:
    raise FormatValueError(f"{text} is not a JSON number", file=file)


def _bounded_int(text: str, file: str | os.PathLike[str] | None) -> int:
    if len(text) > MAX_NUMBER_CHARACTERS or not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise FormatValueError(f"integer {text[:MAX_NUMBER_CHARACTERS]} is beyond 64 bits", file=file)
    return number


def _bounded_float(text: str, file: str | os.PathLike[str] | None) -> float:
    if len(text) > MAX_NUMBER_CHARACTERS or math.isinf(number := float(text)):
        raise FormatValueError(f"number {text[:MAX_NUMBER_CHARACTERS]} is beyond float64", file=file)
    return number
