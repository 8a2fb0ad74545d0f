"""Owns what a conversion writes: the layers and other tensors of a checkpoint in each container.

It must not know where they come from.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from trellis_format.container import manifest as container_manifest
from trellis_format.container import writer as container_writer
from trellis_format.convert_names import NAMES_FILE, LayerNames, dump_names
from trellis_format.errors import FormatUnsupportedError
from trellis_format.exl3.linears import exl3_refusal, plan_linears
from trellis_format.exl3.writer import write_exl3
from trellis_format.native import manifest as native_manifest
from trellis_format.native import writer as native_writer
from trellis_format.slots import row_bytes
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.writer import OutputDirectory, PlannedTensor, deal_shards, write_shard

__all__ = ["TARGETS", "ConvertTarget"]

_OnBytes = Callable[[int], None]
_ReadLayer = Callable[[int], tuple[TrellisSource, TrellisWeights]]
_OUTSIDE = "outside"
_OUTSIDE_SHARD_BYTES = 4 << 30


class ConvertTarget(ABC):
    """A container to write.

    Attributes:
        container: its name.
    """

    container: ClassVar[str]

    @abstractmethod
    def check(self, sources: Mapping[int, TrellisSource]) -> None:
        """Accept layers that the container holds without loss.

        Raises:
            FormatUnsupportedError: if it does not; has the layer and the reason.
        """

    def quantization_config(self, sources: Mapping[int, TrellisSource]) -> dict[str, Any] | None:
        """What the model's `config.json` states as `quantization_config`, where the container has a form for it."""
        del sources
        return None

    @abstractmethod
    def layer_bytes(self, source: TrellisSource) -> int:
        """Bytes of the codes of a layer as they are written."""

    @abstractmethod
    def write(
        self,
        directory: OutputDirectory,
        sources: Mapping[int, TrellisSource],
        read_layer: _ReadLayer,
        outside: Sequence[PlannedTensor],
        names: Mapping[int, LayerNames],
        *,
        shards: int,
        on_bytes: _OnBytes,
    ) -> None:
        """Fill a directory; what is there already is taken as complete.

        Args:
            directory: entered.
            sources: the layers, accepted by `check`.
            read_layer: gives the source and weights of a layer.
            outside: the tensors that belong to no layer.
            names: the names of the layers' experts.
            shards: most shards to write, where the container has any.
            on_bytes: told of each piece of tensor data that was written, in bytes.
        """


class _Exl3Target(ConvertTarget):
    container = "exl3"

    def check(self, sources: Mapping[int, TrellisSource]) -> None:
        for layer, source in sources.items():
            reason = exl3_refusal(source)
            if reason is not None:
                raise FormatUnsupportedError(f"layer {layer}: EXL3 linears cannot hold it: {reason}")

    def layer_bytes(self, source: TrellisSource) -> int:
        return source.code_bytes()

    def write(
        self,
        directory: OutputDirectory,
        sources: Mapping[int, TrellisSource],
        read_layer: _ReadLayer,
        outside: Sequence[PlannedTensor],
        names: Mapping[int, LayerNames],
        *,
        shards: int,
        on_bytes: _OnBytes,
    ) -> None:
        latest = functools.lru_cache(maxsize=1)(lambda layer: read_layer(layer)[1])  # tensors come layer by layer
        tensors = list(outside)
        for layer, source in sources.items():
            tensors += plan_linears(source, functools.partial(latest, layer), names[layer].module)
        write_exl3(directory, tensors, config=None, quantization=None, shards=shards, on_bytes=on_bytes)


class _LayerFileTarget(ConvertTarget):
    """A container of layer files with a manifest; other tensors go to files of their own."""

    def write(
        self,
        directory: OutputDirectory,
        sources: Mapping[int, TrellisSource],
        read_layer: _ReadLayer,
        outside: Sequence[PlannedTensor],
        names: Mapping[int, LayerNames],
        *,
        shards: int,
        on_bytes: _OnBytes,
    ) -> None:
        nbytes = sum(tensor.nbytes for tensor in outside)
        dealt = deal_shards(outside, max(shards, -(-nbytes // _OUTSIDE_SHARD_BYTES))) if outside else []
        for number, shard in enumerate(dealt):
            name = f"{_OUTSIDE}-{number + 1:05d}-of-{len(dealt):05d}.safetensors"
            if not directory.has(name):
                write_shard(directory.file(name), shard, on_bytes=on_bytes)
            else:
                on_bytes(sum(tensor.nbytes for tensor in shard))
        directory.write_json(NAMES_FILE, dump_names({layer: names[layer] for layer in sources}))
        self._write_layers(directory, sources, read_layer, on_bytes)

    @abstractmethod
    def _write_layers(
        self, directory: OutputDirectory, sources: Mapping[int, TrellisSource], read: _ReadLayer, on_bytes: _OnBytes
    ) -> None:
        """Write the layer files that are not there yet, and the manifest."""


class _ContainerTarget(_LayerFileTarget):
    container = "exl3-v1"

    def check(self, sources: Mapping[int, TrellisSource]) -> None:
        container_writer.plan_head(sources)

    def layer_bytes(self, source: TrellisSource) -> int:
        alignment = container_writer.ROW_ALIGNMENT
        return source.extent.slot_count * -(-row_bytes(source) // alignment) * alignment

    def _write_layers(
        self, directory: OutputDirectory, sources: Mapping[int, TrellisSource], read: _ReadLayer, on_bytes: _OnBytes
    ) -> None:
        head, entries = container_writer.plan_head(sources), {}
        for layer, source in sources.items():
            if directory.has(container_manifest.layer_file_name(layer)):
                entries[layer] = container_writer.layer_entry(directory.partial, layer)
                on_bytes(self.layer_bytes(source))
            else:
                content = read(layer)
                entries[layer] = container_writer.write_layer(
                    directory.partial, head, layer, *content, on_bytes=on_bytes
                )
        container_writer.write_manifest(directory.partial, head, entries)


class _NativeTarget(_LayerFileTarget):
    container = "native"

    def check(self, sources: Mapping[int, TrellisSource]) -> None:
        native_writer.plan_head(sources)

    def quantization_config(self, sources: Mapping[int, TrellisSource]) -> dict[str, Any] | None:
        return native_writer.plan_head(sources).config.quantization_config()

    def layer_bytes(self, source: TrellisSource) -> int:
        return source.extent.slot_count * row_bytes(source)

    def _write_layers(
        self, directory: OutputDirectory, sources: Mapping[int, TrellisSource], read: _ReadLayer, on_bytes: _OnBytes
    ) -> None:
        head, entries = native_writer.plan_head(sources), {}
        for layer, source in sources.items():
            if directory.has(native_manifest.layer_file_name(layer)):
                entries[layer] = native_writer.layer_entry(directory.partial, layer, source)
                on_bytes(self.layer_bytes(source))
            else:
                content = read(layer)
                entries[layer] = native_writer.write_layer(directory.partial, head, layer, *content, on_bytes=on_bytes)
        native_writer.write_manifest(directory.partial, head, entries)


TARGETS: dict[str, ConvertTarget] = {
    target.container: target for target in (_Exl3Target(), _ContainerTarget(), _NativeTarget())
}
"""Every target by the name of its container."""
