"""Owns what a conversion reads: the layers of a checkpoint of any container, and all that lies beside them.

It must not know targets.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trellis_format.activations import Activation
from trellis_format.checkpoint import CONFIG_NAME, INDEX_NAME, open_checkpoint
from trellis_format.container import manifest as container_manifest
from trellis_format.container import reader as container_reader
from trellis_format.container.adapter import trellis_from_container
from trellis_format.convert_names import NAMES_FILE, LayerNames, default_names, names_of, read_names
from trellis_format.detect import container_of
from trellis_format.errors import FormatUnsupportedError, in_file
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import Exl3Layer, LayerKey, find_layer, find_layers
from trellis_format.exl3.linear import LINEAR_SUFFIXES, describe_linear
from trellis_format.exl3.names import DEFAULT_PATTERN
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.files.strict_json import read_json
from trellis_format.model_config import parse_model_config
from trellis_format.native import manifest as native_manifest
from trellis_format.native import reader as native_reader
from trellis_format.native.layer import trellis_from_native
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.writer import PlannedTensor, of_array, of_file

__all__ = ["ConvertSource", "Exl3Source", "open_source"]


class ConvertSource(ABC):
    """An opened checkpoint of one container.

    Attributes:
        container: its name.
        path: its directory.
        layers: indices of the layers that have experts, ascending.
        names: the names of their experts.
        outside: every tensor that belongs to no layer's experts.
    """

    container: ClassVar[str]

    def __init__(self, path: Path, names: Mapping[int, LayerNames]) -> None:
        self.path = path
        self.names = dict(sorted(names.items()))
        self.layers = tuple(self.names)
        self.outside: tuple[PlannedTensor, ...] = ()

    @abstractmethod
    def read_layer(self, layer: int, *, verify: bool = True) -> tuple[TrellisSource, TrellisWeights]:
        """Describe one layer; codes stay in the file.

        Args:
            layer: its index.
            verify: whether to compare the digest of the layer's file, where the container has one.

        Raises:
            FormatUnsupportedError: if the layer has what no other container holds.
            FormatError: as the container's own reader.
        """

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that are copied as they are: all but tensors, index and manifest."""

    def close(self) -> None:
        """Close every file that was read from."""
        return

    def identity(self) -> list[list[Any]]:
        """Name, bytes and time of change of every file, which tell whether the checkpoint is the same one."""
        status = ((path.name, path.stat()) for path in sorted(self.path.iterdir()) if path.is_file())
        return [[name, it.st_size, it.st_mtime_ns] for name, it in status]

    def _plain_files(self, but: Iterable[str]) -> list[Path]:
        left_out = {INDEX_NAME, NAMES_FILE, *but}
        return [
            path
            for path in sorted(self.path.iterdir())
            if path.is_file() and path.suffix != ".safetensors" and path.name not in left_out
        ]


class Exl3Source(ConvertSource):
    """An EXL3 checkpoint.

    Args:
        path: its directory.
        pattern: regular expression of expert names.
        ignore_index: do not compare the shards with the index.
    """

    container = "exl3"

    def __init__(self, path: Path, pattern: str, ignore_index: bool) -> None:
        self._checkpoint = open_checkpoint(path, ignore_index=ignore_index)
        self._pattern = pattern
        keys: dict[int, LayerKey] = {}
        modules = find_layers(self._checkpoint, pattern=pattern)
        for key in modules:
            if key.index in keys:
                raise FormatUnsupportedError(
                    f"layer {key.index} has experts under {keys[key.index].prefix} and {key.prefix}; a container has "
                    "one layer of an index: --pattern can match one of them alone",
                    file=path,
                )
            keys[key.index] = key
        super().__init__(path, {key.index: names_of(names) for key, names in modules.items()})
        self._keys, self._modules = keys, {key.index: tuple(names) for key, names in modules.items()}
        experts = {f"{module}.{suffix}" for names in modules.values() for module in names for suffix in LINEAR_SUFFIXES}
        tensors = self._checkpoint.tensors
        self.outside = tuple(of_file(tensor) for name, tensor in tensors.items() if name not in experts)

    def read_layer(self, layer: int, *, verify: bool = True) -> tuple[TrellisSource, TrellisWeights]:
        del verify  # shards have no digest
        described = find_layer(self._checkpoint, self._keys[layer], pattern=self._pattern)
        _check_exact(described)
        return trellis_from_exl3(described)

    def linears(self, layer: int) -> list[PlannedTensor]:
        """The tensors of one layer's experts as they are, but packed signs as float16 vectors."""
        planned = []
        for module in self._modules[layer]:
            parts = {suffix: self._checkpoint.tensors.get(f"{module}.{suffix}") for suffix in LINEAR_SUFFIXES}
            tensors = {suffix: tensor for suffix, tensor in parts.items() if tensor is not None}
            linear = describe_linear(module, tensors)
            for suffix, tensor in tensors.items():
                if suffix in ("su", "sv"):
                    values = linear.read_input_scale() if suffix == "su" else linear.read_output_scale()
                    planned.append(of_array(f"{module}.{suffix}h", values))
                else:
                    planned.append(of_file(tensor))
        return planned

    def files(self) -> list[Path]:
        return self._plain_files(())

    def close(self) -> None:
        self._checkpoint.close()


def _check_exact(layer: Exl3Layer) -> None:
    """Refuse what the description of a layer would not give back bit for bit."""
    for row in layer.experts:
        for linear in row.values():
            bias = linear.tensors.get("bias")
            if bias is not None and bias.entry.dtype != "F16":
                raise FormatUnsupportedError(
                    f"layer {layer.key.index}: bias is {bias.entry.dtype}, other containers hold float16",
                    file=bias.file,
                    tensor=bias.entry.name,
                )


class _LayerFileSource(ConvertSource):
    """A container of layer files with a manifest, and other tensors in files of their own."""

    def __init__(self, path: Path, layers: tuple[int, ...], layer_files: set[str], manifest: str) -> None:
        kept = read_names(path)
        super().__init__(path, {layer: kept.get(layer) or default_names(layer) for layer in layers})
        self._manifest_name = manifest
        self._readers = [
            ShardReader(read_header(file))
            for file in sorted(path.glob("*.safetensors"))
            if file.name not in layer_files and not file.name.startswith(".")
        ]
        self.outside = tuple(
            of_file(FileArray(reader, entry)) for reader in self._readers for entry in reader.header.entries.values()
        )

    def files(self) -> list[Path]:
        return self._plain_files((self._manifest_name,))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class _ContainerSource(_LayerFileSource):
    container = "exl3-v1"

    def __init__(self, path: Path) -> None:
        self._manifest = container_manifest.read_manifest(path)
        layers = tuple(sorted(self._manifest.geometry.moe_layer_indices))
        files = {self._manifest.entry(layer).file for layer in layers}
        super().__init__(path, layers, files, container_manifest.MANIFEST_NAME)

    def read_layer(self, layer: int, *, verify: bool = True) -> tuple[TrellisSource, TrellisWeights]:
        content = container_reader.read_layer(self.path, self._manifest, layer, verify=verify, hold_codes=False)
        activation = self._activation()
        with in_file(self.path / self._manifest.entry(layer).file):
            return trellis_from_container(content, activation=activation, whole=True)

    def _activation(self) -> Activation | None:
        """What the model's configuration beside the container says; the container has no field for it."""
        file = self.path / CONFIG_NAME
        return parse_model_config(read_json(file), file=str(file)).activation() if file.exists() else None


class _NativeSource(_LayerFileSource):
    container = "native"

    def __init__(self, path: Path) -> None:
        self._manifest = native_manifest.read_manifest(path)
        files = {entry.file for entry in self._manifest.layers.values()}
        super().__init__(path, self._manifest.indices, files, native_manifest.MANIFEST_NAME)

    def read_layer(self, layer: int, *, verify: bool = True) -> tuple[TrellisSource, TrellisWeights]:
        for boundary, declared in self._manifest.config.scale:
            if declared.gains != "none":
                raise FormatUnsupportedError(
                    f"layer {layer}: {boundary} are vectors times gains, other containers hold their product alone",
                    file=self.path,
                )
        content = native_reader.read_layer(self.path, self._manifest, layer, verify=verify, hold_codes=False)
        with in_file(self.path / self._manifest.layers[str(layer)].file):
            return trellis_from_native(content, whole=True)


def open_source(
    path: str | os.PathLike[str], *, pattern: str = DEFAULT_PATTERN, ignore_index: bool = False
) -> ConvertSource:
    """Open a checkpoint of any container from its headers.

    Args:
        path: its directory.
        pattern: regular expression of expert names in EXL3; see `trellis_format.exl3.names.DEFAULT_PATTERN`.
        ignore_index: do not compare EXL3 shards with the index.

    Raises:
        FormatUnsupportedError: if two layers of experts have one index, or names are of the rank-sliced dialect.
        FormatError: as the container's own reader.
    """
    container = container_of(path)
    if container == "exl3-v1":
        return _ContainerSource(Path(path))
    if container == "native":
        return _NativeSource(Path(path))
    return Exl3Source(Path(path), pattern, ignore_index)
