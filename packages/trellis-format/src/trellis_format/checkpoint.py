"""Owns a checkpoint directory: its shards' headers, its index and its configurations.  It must not know quantisation.

Opening reads headers and JSON only.  Tensor headers decide what exists; the index must agree with them both ways.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from trellis_format.errors import FormatArgumentError, FormatNotFoundError, FormatValueError
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.collector import paused_collector
from trellis_format.files.header import read_header
from trellis_format.files.strict_json import read_json

__all__ = ["CONFIG_NAME", "INDEX_NAME", "QUANTIZATION_CONFIG_NAME", "Checkpoint", "open_checkpoint"]

INDEX_NAME = "model.safetensors.index.json"
"""File that maps tensors to shards where there are several."""
CONFIG_NAME = "config.json"
"""File with the model's configuration."""
QUANTIZATION_CONFIG_NAME = "quantization_config.json"
"""File with what the converter wrote about each module."""
MAX_SHARDS = 100_000
"""Most shards of one checkpoint."""
_TRUST_SHARDS = "--ignore-index (ignore_index=True) trusts the shards"


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: its directory.
        tensors: every tensor by name, readable by position.
        config: parsed `config.json`, or None.
        quantization_config: parsed `quantization_config.json`, or None.
        notes: what was set aside while opening, in words.
    """

    path: Path
    tensors: dict[str, FileArray]
    config: dict[str, Any] | None
    quantization_config: dict[str, Any] | None
    readers: tuple[ShardReader, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every shard that was read from."""
        for reader in self.readers:
            reader.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that were read so far."""
        return sum(reader.bytes_read for reader in self.readers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@paused_collector()
def open_checkpoint(
    path: str | os.PathLike[str], *, ignore_index: bool = False, but: Collection[str] = ()
) -> Checkpoint:
    """Open a checkpoint directory from headers alone.

    Args:
        path: a directory of safetensors shards.
        ignore_index: take the shards' headers as they are and do not compare them with the index.
        but: names of files that are no shards, such as the layer files of a container; where there are any, no shard
            needs to be left.

    Raises:
        FormatNotFoundError: if the directory or a shard that the index names does not exist.
        FormatArgumentError: if it is no directory or holds no shard.
        FormatValueError: if a header breaks a rule, two shards hold one tensor, or the index and the headers disagree;
            names both sides.
    """
    directory = Path(path)
    names = _shard_names(directory)
    notes = [f"{name} is hidden: not read" for name in names if name.startswith(".")]
    found = [name for name in names if name not in but and not name.startswith(".")]
    index = None if ignore_index else _read_index(directory)
    if not found and not index and not but:
        raise FormatArgumentError("no *.safetensors file in the checkpoint directory", file=directory)
    if len(found) > MAX_SHARDS:
        raise FormatValueError(f"{len(found)} shards exceed the bound of {MAX_SHARDS}", file=directory)
    listed = set((index or {}).values())
    _check_listed(listed, found, directory)
    readers: list[ShardReader] = []
    tensors: dict[str, FileArray] = {}
    origin: dict[str, str] = {}
    for name in sorted(found, key=lambda name: index is not None and name not in listed):
        header = read_header(directory / name)
        if index is not None and name not in listed and header.entries.keys() <= origin.keys():
            notes.append(f"{name} is not in {INDEX_NAME}, whose shards hold each of its tensors: not read")
            continue
        reader = ShardReader(header)
        readers.append(reader)
        for entry in header.entries.values():
            if entry.name in origin:
                raise FormatValueError(
                    f"duplicate tensor: also in {origin[entry.name]}", file=directory / name, tensor=entry.name
                )
            origin[entry.name] = name
            tensors[entry.name] = FileArray(reader, entry)
    if index is not None:
        _compare_index(index, origin, directory)
    return Checkpoint(
        directory,
        tensors,
        _read_object(directory / CONFIG_NAME),
        _read_object(directory / QUANTIZATION_CONFIG_NAME),
        tuple(readers),
        tuple(notes),
    )


def _check_listed(listed: Collection[str], found: Collection[str], directory: Path) -> None:
    missing = sorted(set(listed) - set(found))
    if missing:
        raise FormatNotFoundError(
            f"the index names {len(missing)} shards that are not in the directory, first {missing[0]!r}; "
            f"{_TRUST_SHARDS}",
            file=directory / INDEX_NAME,
            numbers={"missing": len(missing)},
        )


def _shard_names(directory: Path) -> list[str]:
    if not directory.exists():
        raise FormatNotFoundError("no such checkpoint directory", file=directory)
    if not directory.is_dir():
        raise FormatArgumentError("a checkpoint is a directory of safetensors files, this is a file", file=directory)
    try:
        return sorted(name.name for name in directory.iterdir() if name.name.endswith(".safetensors"))
    except OSError as error:
        raise FormatValueError(f"cannot be listed: {error.strerror or error}", file=directory) from error


def _read_object(path: Path) -> dict[str, Any] | None:
    if not os.path.lexists(path):  # a link to nothing is a fault, not an absence
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise FormatValueError(f"must hold a JSON object, got {type(value).__name__}", file=path)
    return value


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX_NAME
    index = _read_object(path)
    if index is None:
        return None
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise FormatValueError("weight_map must map tensor names to file names", file=path)
    for name in sorted(set(mapping.values())):
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise FormatValueError(
                f"weight_map names {name[:80]!r}; shards must be *.safetensors files of the directory itself", file=path
            )
    return mapping


def _compare_index(index: dict[str, str], origin: dict[str, str], directory: Path) -> None:
    if index == origin:
        return
    absent = [name for name, shard in _differences(index, origin)]
    hidden = [name for name, shard in _differences(origin, index)]
    if absent or hidden:
        raise FormatValueError(
            f"the index and the shards disagree: {len(absent)} tensors are listed in the index but not in that shard"
            f"{_first(absent)}, {len(hidden)} are in a shard but not listed{_first(hidden)}; {_TRUST_SHARDS}",
            file=directory / INDEX_NAME,
            numbers={"listed_only": len(absent), "stored_only": len(hidden)},
        )


def _differences(left: dict[str, str], right: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, shard) for name, shard in left.items() if right.get(name) != shard)


def _first(names: list[str]) -> str:
    return f" (first {', '.join(names[:3])})" if names else ""
