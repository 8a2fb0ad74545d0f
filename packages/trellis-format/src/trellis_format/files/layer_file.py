"""Owns the read of a safetensors file whose tensors are known beforehand, with its SHA-256.

It must not know what the tensors mean.  With a digest the file is read once, front to back and in pieces, and the rows
that are wanted are kept as they pass, so that what is used is what was hashed.  Without one, only those rows are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatValueError
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header

__all__ = ["LayerFile", "file_sha256"]

_PIECE_BYTES = 4 << 20


class LayerFile:
    """An opened layer file.

    Args:
        path: the file.

    Raises:
        FormatNotFoundError: if there is no such file.
        FormatValueError: if its header breaks a rule.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        header = read_header(path)
        self.path = Path(path)
        self.metadata = header.metadata
        self._reader = ShardReader(header)
        self._size = header.identity.size
        self.tensors = {entry.name: FileArray(self._reader, entry) for entry in header.entries.values()}

    def __enter__(self) -> LayerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._reader.close()

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far, without the header."""
        return self._reader.bytes_read

    def check_names(self, expected: set[str]) -> None:
        """Accept a file with exactly these tensors.

        Raises:
            FormatValueError: if one is missing or not expected; has both lists.
        """
        extra, missing = sorted(set(self.tensors) - expected), sorted(expected - set(self.tensors))
        if extra or missing:
            raise FormatValueError(
                f"the layer file must have exactly the tensors {sorted(expected)}; unexpected: {_some(extra)}, "
                f"missing: {_some(missing)}",
                file=self.path,
            )

    def check_metadata(self, expected: Mapping[str, str]) -> None:
        """Accept a file whose metadata states these values.

        Raises:
            FormatValueError: if one differs; names the key and both values.
        """
        for key, value in expected.items():
            found = self.metadata.get(key)
            if found != value:
                shown = "nothing" if found is None else repr(found[:80])
                raise FormatValueError(f"metadata {key} says {shown}, the manifest {value!r}", file=self.path)

    def load(self, rows: Mapping[str, slice], *, sha256: str | None) -> dict[str, npt.NDArray[Any]]:
        """Read ranges of the first axis of tensors.

        Args:
            rows: first and last row of each tensor to read, by name.
            sha256: digest of the whole file in hexadecimal, compared; None reads the ranges alone.

        Returns:
            The arrays by name.

        Raises:
            FormatValueError: if the digest differs ("sha256", both), the file is short, or it changed.
        """
        arrays, ranges = {}, []
        for name, part in rows.items():
            tensor = self.tensors[name]
            row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
            flat = np.empty((part.stop - part.start) * row_bytes, dtype=np.uint8)
            arrays[name] = flat.view(tensor.dtype).reshape(part.stop - part.start, *tensor.shape[1:])
            ranges.append((tensor.entry.begin + part.start * row_bytes, flat, name))
        if sha256 is not None:
            self._stream(ranges, sha256)
        else:
            for begin, flat, name in ranges:
                self._reader.read_into(begin, flat.data, name)
        return arrays

    def _stream(self, ranges: list[tuple[int, npt.NDArray[np.uint8], str]], expected: str) -> None:
        digest, piece = hashlib.sha256(), np.empty(min(_PIECE_BYTES, self._size), dtype=np.uint8)
        for first in range(0, self._size, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, self._size - first)]
            self._reader.read_into(first, part.data, "")
            digest.update(part.data)
            for begin, flat, _ in ranges:
                low, high = max(begin, first), min(begin + flat.size, first + part.size)
                if low < high:
                    flat[low - begin : high - begin] = part[low - first : high - first]
        if digest.hexdigest() != expected.lower():
            raise FormatValueError(f"sha256 is {digest.hexdigest()}, the manifest says {expected}", file=self.path)


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces.

    Raises:
        FormatValueError: if it cannot be read.
    """
    try:
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise FormatValueError(f"cannot be read: {error.strerror or error}", file=path) from error


def _some(names: list[str]) -> str:
    shown = [name[:80] for name in names[:8]]
    return f"{shown}{f' and {len(names) - 8} more' if len(names) > 8 else ''}" if names else "none"
