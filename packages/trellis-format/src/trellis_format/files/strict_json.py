"""Owns the parse of JSON that a stranger wrote: bounded in bytes and depth, duplicate keys refused.

It must not know what the JSON means.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from trellis_format.errors import FormatNotFoundError, FormatValueError

__all__ = ["MAX_JSON_BYTES", "MAX_JSON_DEPTH", "parse_json", "read_json"]

MAX_JSON_BYTES = 256 << 20
"""Largest JSON file that is read, in bytes; the largest published index is under 20 MiB."""
MAX_JSON_DEPTH = 64
"""Deepest nesting that is parsed."""
MAX_INTEGER_DIGITS = 20
"""Longest integer that is parsed: 64 bits and a sign."""

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


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
        if not file.is_file():
            raise FormatNotFoundError("no such file", file=file)
        size = file.stat().st_size
        if size > max_bytes:
            raise FormatValueError(f"JSON of {size} bytes exceeds the bound of {max_bytes} bytes", file=file)
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        if isinstance(error, FormatNotFoundError):
            raise
        raise FormatValueError(f"cannot be read: {error.strerror or error}", file=file) from error
    if len(data) > max_bytes:
        raise FormatValueError(f"JSON grew beyond the bound of {max_bytes} bytes while it was read", file=file)
    return parse_json(data, file=file)


def parse_json(data: bytes, *, file: str | os.PathLike[str] | None = None) -> Any:
    """Parse JSON bytes.

    Args:
        data: UTF-8 text.
        file: named in errors.

    Raises:
        FormatValueError: if the bytes are not UTF-8 JSON, nest deeper than `MAX_JSON_DEPTH`, repeat a key in one
            object, or hold a NaN, an infinity or an integer beyond 64 bits.
    """
    _check_depth(data, file)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: _unique(pairs, file),
            parse_constant=lambda text: _refuse_constant(text, file),
            parse_int=lambda text: _bounded_int(text, file),
        )
    except UnicodeDecodeError as error:
        raise FormatValueError(f"not UTF-8 at byte {error.start}", file=file) from error
    except json.JSONDecodeError as error:
        raise FormatValueError(f"not JSON: {error.msg} at byte {error.pos}", file=file) from error
    except RecursionError as error:
        raise FormatValueError(f"JSON nests deeper than {MAX_JSON_DEPTH}", file=file) from error


def _check_depth(data: bytes, file: str | os.PathLike[str] | None) -> None:
    if data.count(b"{") + data.count(b"[") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _STRUCTURE.finditer(data):
        token = match.group()
        if token in (b"{", b"["):
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise FormatValueError(f"JSON nests deeper than {MAX_JSON_DEPTH} at byte {match.start()}", file=file)
        elif token in (b"}", b"]"):
            depth -= 1


def _unique(pairs: list[tuple[str, Any]], file: str | os.PathLike[str] | None) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatValueError(f"duplicate key {repeated!r}", file=file)
    return result


def _refuse_constant(text: str, file: str | os.PathLike[str] | None) -> Any:
    raise FormatValueError(f"{text} is not a JSON number", file=file)


def _bounded_int(text: str, file: str | os.PathLike[str] | None) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise FormatValueError(f"integer of {len(text)} digits; at most {MAX_INTEGER_DIGITS}", file=file)
    return int(text)
