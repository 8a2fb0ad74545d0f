"""Owns one cached share as a file: a safetensors file whose metadata has its key and the SHA-256 of its data.

It must not know where entries lie or when they are made.  A file appears under its name complete or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.errors import FormatValueError
from trellis_format.files.arrays import ShardReader
from trellis_format.files.header import ShardHeader, read_header
from trellis_prep.lanes import Move
from trellis_prep.layout import LAYOUT_VERSION, PreparedLayout
from trellis_prep.loads import flat_bytes
from trellis_prep.prepared import PreparedExperts
from trellis_prep.transfer import Load, Read

__all__ = ["CACHE_SCHEMA", "CacheFile", "write_cache_file"]

CACHE_SCHEMA = "trellis-prep/prepared/1"
"""Schema and version of a cached share's file."""
_DTYPES = {"int32": "I32", "int64": "I64", "float16": "F16"}
_NO_DIGEST = "0" * 64
_PARTIAL = ".tmp"


class CacheFile:
    """A cached share whose header was checked.

    Args:
        path: the file.
        layout: what it must hold.
        key: what it must be called inside.

    Raises:
        FormatNotFoundError: if there is no such file.
        FormatValueError: if it is not a whole entry of that key and layout.
    """

    def __init__(self, path: Path, layout: PreparedLayout, key: str) -> None:
        self._header = read_header(path)
        self._layout = layout
        self._digest = hashlib.sha256()
        _check_header(self._header, layout, key)

    def loads(self, tensors: Mapping[str, torch.Tensor], piece_bytes: int) -> Iterator[Load]:
        """The loads that fill the tensors from the file, in pieces.

        Args:
            tensors: destinations by the names of `layout.tensors`.
            piece_bytes: bytes of a slot.
        """
        reader = ShardReader(self._header)
        try:
            for spec in self._layout.tensors:
                target, begin = flat_bytes(tensors[spec.name]), self._header.entries[spec.name].begin
                for first in range(0, spec.nbytes, piece_bytes):
                    nbytes = min(piece_bytes, spec.nbytes - first)
                    read = partial(self._read, reader, begin + first, spec.name)
                    moves = (Move(0, target, first, nbytes),)
                    yield Load(f"cached {spec.name} from byte {first}", (Read(0, nbytes, read),), moves)
        finally:
            reader.close()

    def check_digest(self) -> None:
        """Accept what was read, once all loads were.

        Raises:
            FormatValueError: if its SHA-256 is not the one in the metadata; names both.
        """
        found, stated = self._digest.hexdigest(), self._header.metadata["sha256"]
        if found != stated:
            raise FormatValueError(f"sha256 of the data is {found}, the entry states {stated}", file=self._header.path)

    def _read(self, reader: ShardReader, offset: int, name: str, out: npt.NDArray[np.uint8]) -> None:
        reader.read_into(offset, out.data, name)
        self._digest.update(out.data)


def write_cache_file(path: Path, key: str, prepared: PreparedExperts, piece_bytes: int) -> None:
    """Write an entry: beside its place first, then moved there, so that a reader sees all of it or none.

    Args:
        path: its place.
        key: its name.
        prepared: what to write.
        piece_bytes: host bytes to use at a time where the tensors are on a device.

    Raises:
        OSError: if the file cannot be written; nothing is left behind.
    """
    layout, tensors = prepared.layout, prepared.tensors
    _sweep(path.parent)
    stream, partial_path = _open_partial(path)
    try:
        with stream:
            digest = hashlib.sha256()
            _write(stream, _header_bytes(layout, key, _NO_DIGEST))
            for spec in layout.tensors:
                flat = flat_bytes(tensors[spec.name])
                for first in range(0, spec.nbytes, piece_bytes):
                    piece = flat[first : first + piece_bytes].cpu().numpy().data
                    digest.update(piece)
                    _write(stream, piece)
            stream.seek(0)
            _write(stream, _header_bytes(layout, key, digest.hexdigest()))
            os.fsync(stream.fileno())
            os.replace(partial_path, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial_path.unlink()


def _open_partial(path: Path) -> tuple[FileIO, Path]:
    """A new file beside an entry's place, and its path.

    A lock on it says that its writer lives.  Where the file system has no locks, nothing is swept either.
    """
    while True:
        partial_path = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}{_PARTIAL}")
        stream = FileIO(partial_path, "xb")
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return stream, partial_path
        stream.close()  # another process swept it before it was locked


def _sweep(directory: Path) -> None:
    """Remove what killed writers left: a writer that lives holds a lock on its file."""
    for path in directory.glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _header_bytes(layout: PreparedLayout, key: str, digest: str) -> bytes:
    """Length and JSON; the length does not depend on the digest."""
    entries: dict[str, Any] = {"__metadata__": _metadata(key) | {"sha256": digest}}
    place = 0
    for spec in layout.tensors:
        offsets = [place, place + spec.nbytes]
        entries[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        place += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins on 8 bytes, as the largest element needs
    return len(text).to_bytes(8, "little") + text


def _metadata(key: str) -> dict[str, str]:
    return {"schema": CACHE_SCHEMA, "layout_version": str(LAYOUT_VERSION), "key": key}


def _check_header(header: ShardHeader, layout: PreparedLayout, key: str) -> None:
    for name, expected in _metadata(key).items():
        if header.metadata.get(name) != expected:
            raise FormatValueError(
                f"not the entry that its name says: {name} is {header.metadata.get(name)!r}, not {expected!r}",
                file=header.path,
            )
    if "sha256" not in header.metadata:
        raise FormatValueError("entry without a sha256", file=header.path)
    expected_entries = {spec.name: (_DTYPES[spec.dtype], spec.shape) for spec in layout.tensors}
    found = {entry.name: (entry.dtype, entry.shape) for entry in header.entries.values()}
    if found != expected_entries:
        raise FormatValueError(f"entry holds {found}, the layout has {expected_entries}", file=header.path)


def _write(stream: Any, data: Any) -> None:
    """Write all of it: an unbuffered stream may take a part."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[stream.write(rest) :]
