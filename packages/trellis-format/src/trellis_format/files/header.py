"""Owns the safetensors header: 8 bytes of length, JSON, and the rules that make offsets safe to follow.

It must not read tensor data, nor know what a tensor means.  Rules: every tensor has a known dtype, a shape of
non-negative integers, and offsets that span exactly its bytes; together the tensors cover the data without overlap
or hole; the header fits the file.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trellis_format.errors import FormatNotFoundError, FormatValueError
from trellis_format.files.strict_json import parse_json

__all__ = ["DTYPE_BITS", "MAX_HEADER_BYTES", "MAX_TENSORS", "FileIdentity", "ShardHeader", "TensorEntry", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""Largest header that is parsed, in bytes; the bound of the safetensors library."""
MAX_TENSORS = 1 << 18
"""Most tensors of a shard: each takes about a KiB while the header is checked, and 16 microseconds."""
MAX_DIMENSIONS = 16
"""Most axes a tensor may have."""
MAX_EXTENT = 1 << 62
"""Bound on any dimension and on any tensor's bytes, so that no product leaves 64 bits."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element of each safetensors dtype."""
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class TensorEntry(NamedTuple):
    """One tensor of a shard: its dtype, shape, and where its bytes are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What must stay the same between the header and the data that is read by it."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity that a stat result shows."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def is_of(self, status: os.stat_result) -> bool:
        """Whether a stat result shows this identity; it is asked after each read of many, so no other one is made."""
        return (
            status.st_mtime_ns == self.modified_ns
            and status.st_size == self.size
            and status.st_ino == self.inode
            and status.st_dev == self.device
        )


@dataclass(frozen=True)
class ShardHeader:
    """A checked header: entries by name, metadata, and the identity of the file that it was read from."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    identity: FileIdentity


def read_header(path: str | os.PathLike[str]) -> ShardHeader:
    """Read and check the header of a safetensors file; no tensor data is read.

    Args:
        path: the file.

    Raises:
        FormatNotFoundError: if there is no such file.
        FormatValueError: if the header breaks a rule; names the file, the tensor, the numbers and the rule.
    """
    file = Path(path)
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise FormatNotFoundError("no such file", file=file) from error
    except OSError as error:
        raise FormatValueError(f"cannot be opened: {error.strerror or error}", file=file) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatValueError("not a regular file", file=file)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                text = f"{len(prefix)} bytes: too short for a safetensors header length"
                raise FormatValueError(text, file=file, numbers={"observed": len(prefix), "expected": 8})
            length = int.from_bytes(prefix, "little")
            _check_length(length, status.st_size, file)
            raw = stream.read(length)
    except OSError as error:
        raise FormatValueError(f"cannot be read: {error.strerror or error}", file=file) from error
    finally:
        os.close(descriptor)
    if len(raw) < length:
        raise FormatValueError(f"truncated: header of {length} bytes, {len(raw)} read", file=file)
    _check_count(raw, file)
    parsed = parse_json(raw, file=file)
    if not isinstance(parsed, dict):
        raise FormatValueError(f"header must be a JSON object, got {type(parsed).__name__}", file=file)
    metadata = _metadata(parsed.pop("__metadata__", {}), file)
    entries = {name: _entry(name, value, 8 + length, file) for name, value in parsed.items()}
    _check_cover(entries, 8 + length, status.st_size, file)
    return ShardHeader(file, entries, metadata, FileIdentity.of(status))


def _check_length(length: int, size: int, file: Path) -> None:
    if length > MAX_HEADER_BYTES:
        text = f"header of {length} bytes exceeds the bound of {MAX_HEADER_BYTES}"
        raise FormatValueError(text, file=file, numbers={"observed": length, "limit": MAX_HEADER_BYTES})
    if 8 + length > size:
        text = f"truncated: header of {length} bytes at offset 8 in a file of {size} bytes"
        raise FormatValueError(text, file=file, numbers={"observed": size, "expected": 8 + length})
    if length < 2:
        text = f"header of {length} bytes is too short for a JSON object"
        raise FormatValueError(text, file=file, numbers={"observed": length, "expected": 2})


def _check_count(raw: bytes, file: Path) -> None:
    """Hold a header to its number of tensors before it is parsed; every entry has a shape and offsets, each a list."""
    count = raw.count(b"[") // 2
    if count > MAX_TENSORS:
        text = f"header of {count} tensors exceeds the bound of {MAX_TENSORS} of a shard"
        raise FormatValueError(text, file=file, numbers={"observed": count, "limit": MAX_TENSORS})


def _metadata(value: Any, file: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatValueError("__metadata__ must map strings to strings", file=file)
    return value


def _entry(name: str, value: Any, base: int, file: Path) -> TensorEntry:
    def refuse(message: str, **numbers: int) -> FormatValueError:
        return FormatValueError(message, file=file, tensor=name, numbers=numbers)

    if type(value) is not dict or value.keys() != _ENTRY_KEYS:
        raise refuse("header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        raise refuse(f"unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise refuse(f"shape must be at most {MAX_DIMENSIONS} integers in [0, 2^62], got {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise refuse(f"data_offsets must be two integers in [0, 2^62], got {str(offsets)[:80]}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    expected, (begin, end) = bits // 8, offsets
    if bits % 8 or expected > MAX_EXTENT:
        raise refuse(f"{dtype} {shape} is not a whole number of bytes below 2^62")
    if end - begin != expected:
        text = f"data_offsets [{begin}, {end}] span {end - begin} bytes; {dtype} {shape} needs {expected}"
        raise refuse(text, observed=end - begin, expected=expected)
    return TensorEntry(name, dtype, tuple(shape), base + begin, base + end)


def _are_sizes(values: Any) -> bool:
    if type(values) is not list:
        return False
    for size in values:  # noqa: SIM110  # a header has a million of them, and a generator takes twice as long
        if type(size) is not int or not 0 <= size <= MAX_EXTENT:
            return False
    return True


def _check_cover(entries: dict[str, TensorEntry], base: int, size: int, file: Path) -> None:
    position = base
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise FormatValueError(
                f"data_offsets begin at {entry.begin - base}, expected {position - base}: {kind}",
                file=file,
                tensor=entry.name,
                numbers={"observed": entry.begin - base, "expected": position - base},
            )
        position = entry.end
    if position != size:
        kind = "truncated" if position > size else "trailing bytes"
        text = f"{kind}: tensors end at byte {position}, the file has {size}"
        raise FormatValueError(text, file=file, numbers={"observed": size, "expected": position})
