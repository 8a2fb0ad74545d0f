"""Owns the layer files of a directory of either container, as its manifest declares them.

It must not judge what is wrong with one, nor know what asks.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trellis_format.activations import Activation
from trellis_format.container import manifest as container_manifest
from trellis_format.container import reader as container_reader
from trellis_format.container.adapter import trellis_from_container
from trellis_format.container.extents import extent_alignment
from trellis_format.container.layer import ContainerPairLayer, check_content
from trellis_format.errors import FormatError, FormatUnsupportedError, FormatValueError, in_file
from trellis_format.extent import BLOCK_SLOTS, SLOT, TrellisExtent
from trellis_format.files.layer_file import LayerFile
from trellis_format.native import manifest as native_manifest
from trellis_format.native import reader as native_reader
from trellis_format.native.layer import rates_of, source_of, trellis_from_native
from trellis_format.rate_table import RateTable
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
from trellis_format.transform import ExpertTransform

__all__ = ["LayerFacts", "LayerFiles", "open_layer_files"]


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What manifest and header tell of one layer.

    Attributes:
        num_experts: experts.
        hidden_size: channels that an expert takes and gives, as stored.
        intermediate_size: channels between the GEMMs, as stored.
        projections: of every expert, in order.
        rates: K of every expert and projection, None with pair rates.
        geometry: the sizes; None where no layer can have them.
        biased: the projections with a bias.
        up_divisor: the number by which up was divided.
        obstacle: why the layer cannot be described without its container, None where it can.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    projections: tuple[Projection, ...]
    rates: RateTable | None
    geometry: ExpertGeometry | None
    biased: tuple[Projection, ...] = ()
    up_divisor: float = 1.0
    obstacle: str | None = None


class LayerFiles(ABC):
    """The layer files of a container.

    Attributes:
        path: its directory.
        names: file name of each layer, ascending by index.
        digests: SHA-256 that the manifest states, by index.
        codebook: name of the one codebook.
        projections: of every expert, in order.
        pair_kinds: kinds of pairs of records whose K differ, where there are any.
        alignment_slots: slots that cuts of the intermediate axis are multiples of.
        barriers: slots that no share may reach across.
        rotation: kind and channels of the rotation of every linear; 0 channels without one.
        transform: the change of basis at the activation, in words, or None.
        activation: the law between the GEMMs, where the manifest states it.
        manifest_name: file name of the manifest.
    """

    path: Path
    names: dict[int, str]
    digests: dict[int, str]
    codebook: str
    projections: tuple[Projection, ...]
    pair_kinds: tuple[str, ...] = ()
    alignment_slots: int = BLOCK_SLOTS
    barriers: tuple[int, ...] = ()
    rotation: tuple[str, int]
    transform: str | None = None
    activation: Activation | None = None
    manifest_name: str

    @abstractmethod
    def open(self, layer: int) -> LayerFile:
        """Open one layer file and hold its header to the manifest; the caller closes it.

        Raises:
            FormatError: as the container's reader.
        """

    @abstractmethod
    def facts(self, layer: int, file: LayerFile) -> LayerFacts:
        """What is known of a layer without its data; of a native one its rate bytes are read.

        Args:
            layer: index.
            file: from `open`.
        """

    @abstractmethod
    def read(
        self,
        layer: int,
        extent: TrellisExtent | None = None,
        *,
        activation: Activation | None = None,
        verify: bool = True,
    ) -> tuple[TrellisSource, TrellisWeights]:
        """Describe one layer; codes stay in the file.

        Args:
            layer: index.
            extent: the share of the intermediate axis (default: all of it).
            activation: the law between the GEMMs, where the manifest states none or another is wanted.
            verify: whether to compare the file's digest.

        Raises:
            FormatError: as the container's reader and adapter.
        """

    @abstractmethod
    def read_whole(self, layer: int) -> tuple[TrellisSource, TrellisWeights]:
        """Hold all of a layer to its rules, the digest included, and describe it as one that is carried.

        Barriers do not matter; see `whole` of the container's adapter.

        Args:
            layer: index.

        Raises:
            FormatUnsupportedError: if the layer is sound, but no adapter takes it.
            FormatError: as the container's reader and adapter.
        """

    @abstractmethod
    def _declared(self) -> dict[str, Any]:
        """The manifest as a JSON object, without layers and sizes."""

    def statements(self) -> Iterator[tuple[str, str]]:
        """(path of a key, value as text) of all that the manifest states about every layer."""
        yield from _flatten("", self._declared())


class _ContainerFiles(LayerFiles):
    manifest_name = container_manifest.MANIFEST_NAME
    projections = tuple(Projection)

    def __init__(self, path: Path) -> None:
        manifest = self._manifest = container_manifest.read_manifest(path)
        entries = {layer: manifest.entry(layer) for layer in sorted(manifest.geometry.moe_layer_indices)}
        self.path = path
        self.names = {layer: entry.file for layer, entry in entries.items()}
        self.digests = {layer: entry.sha256 for layer, entry in entries.items()}
        self.codebook = manifest.codebook
        self.pair_kinds = tuple(sorted(manifest.rates.pair_kinds or ()))
        self.alignment_slots, self.barriers = extent_alignment(manifest), manifest.layout.extent_barriers
        self.rotation = ("scaled_hadamard", SLOT * BLOCK_SLOTS)
        hadamard = manifest.hadamard
        if hadamard.intermediate_hadamard:
            self.transform = f"intermediate_hadamard, blocks of {hadamard.pre_block} and {hadamard.post_block} channels"

    def open(self, layer: int) -> LayerFile:
        return _opened(self.path / self.names[layer], lambda file: self._check(layer, file))

    def _check(self, layer: int, file: LayerFile) -> None:
        container_reader.check_header(self._manifest, layer, file)

    def facts(self, layer: int, file: LayerFile) -> LayerFacts:
        del layer, file  # every layer is as the manifest says
        manifest, rate = self._manifest, self._manifest.uniform_rate
        sizes, rates = manifest.geometry, None if rate is None else RateTable.uniform(rate)
        geometry, obstacle = None, None
        try:
            geometry = ExpertGeometry(
                num_experts=sizes.num_experts,
                hidden_size=sizes.hidden_size,
                intermediate_size=sizes.intermediate_size,
                padded_hidden_size=sizes.hidden_size,
                padded_intermediate_size=sizes.intermediate_size,
            )
            if rates is None:
                raise FormatUnsupportedError(f"pair rates of kinds {', '.join(self.pair_kinds)} are not handled")
            self._describe(geometry, rates)
        except FormatError as error:
            obstacle = error.message
        return LayerFacts(
            num_experts=sizes.num_experts,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            projections=self.projections,
            rates=rates,
            geometry=geometry,
            obstacle=obstacle,
        )

    def _describe(self, geometry: ExpertGeometry, rates: RateTable) -> None:
        hadamard, transform = self._manifest.hadamard, None
        if hadamard.pre_block is not None and hadamard.post_block is not None:
            transform = ExpertTransform(pre_block=hadamard.pre_block, post_block=hadamard.post_block)
        TrellisSource(
            codebook=self.codebook,
            geometry=geometry,
            rates=rates,
            layout=CodeLayout.SLOT_MAJOR,
            extent=TrellisExtent.whole(geometry.padded_intermediate_size),
            joint_input_scales=transform is not None,
            expert_transform=transform,
        )

    def read(
        self,
        layer: int,
        extent: TrellisExtent | None = None,
        *,
        activation: Activation | None = None,
        verify: bool = True,
    ) -> tuple[TrellisSource, TrellisWeights]:
        content = container_reader.read_layer(self.path, self._manifest, layer, extent, verify=verify, hold_codes=False)
        with in_file(self.path / self.names[layer]):
            return trellis_from_container(content, activation=activation)

    def read_whole(self, layer: int) -> tuple[TrellisSource, TrellisWeights]:
        content = container_reader.read_layer(self.path, self._manifest, layer, hold_codes=False)
        with in_file(self.path / self.names[layer]):
            if isinstance(content, ContainerPairLayer):  # which the adapter refuses unseen
                check_content(content, barriers=False)
            return trellis_from_container(content, whole=True)

    def _declared(self) -> dict[str, Any]:
        left_out = ("layers", "geometry", "kind")
        return {key: value for key, value in self._manifest.to_json().items() if key not in left_out}


class _NativeFiles(LayerFiles):
    manifest_name = native_manifest.MANIFEST_NAME

    def __init__(self, path: Path) -> None:
        manifest = self._manifest = native_manifest.read_manifest(path)
        entries = {layer: manifest.layers[str(layer)] for layer in manifest.indices}
        self.path = path
        self.names = {layer: entry.file for layer, entry in entries.items()}
        self.digests = {layer: entry.sha256 for layer, entry in entries.items()}
        self.codebook = manifest.config.codebook
        self.projections = manifest.geometry.geometry().projections
        projection, expert = manifest.config.transform.projection, manifest.config.transform.expert
        self.rotation = (projection.kind, projection.block_size or 0)
        if expert.kind != "none":
            blocks = f"{expert.pre_block_size} and {expert.post_block_size}"
            self.transform = f"{expert.kind}, blocks of {blocks} channels"
            self.barriers = (manifest.geometry.padded_intermediate_size // SLOT // 2,)
        if manifest.activation is not None:
            self.activation = manifest.activation.activation()

    def open(self, layer: int) -> LayerFile:
        return _opened(self.path / self.names[layer], lambda file: self._check(layer, file))

    def _check(self, layer: int, file: LayerFile) -> None:
        with contextlib.suppress(FormatUnsupportedError):  # sound as far as it can be told; `facts` says what lacks
            native_reader.check_header(self._manifest, layer, file)

    def facts(self, layer: int, file: LayerFile) -> LayerFacts:
        config, geometry = self._manifest.config, self._manifest.geometry.geometry()
        entry = self._manifest.layers[str(layer)]
        biased = tuple(Projection(name) for name in entry.biased)
        divisor = 1.0 if entry.up_divisor is None else entry.up_divisor
        rates, obstacle = None, None
        try:
            rate = file.tensors["rate"].read()
            rates = rates_of(config, geometry, rate)
            transform = config.expert_transform()
            source_of(
                config, geometry=geometry, rate=rate, biased=biased, up_divisor=divisor,
                joint_input_scales=transform is not None,
            )  # fmt: skip
        except FormatError as error:
            obstacle = error.message
        return LayerFacts(
            num_experts=geometry.num_experts,
            hidden_size=geometry.padded_hidden_size,
            intermediate_size=geometry.padded_intermediate_size,
            projections=geometry.projections,
            rates=rates,
            geometry=geometry,
            biased=biased,
            up_divisor=divisor,
            obstacle=obstacle,
        )

    def read(
        self,
        layer: int,
        extent: TrellisExtent | None = None,
        *,
        activation: Activation | None = None,
        verify: bool = True,
    ) -> tuple[TrellisSource, TrellisWeights]:
        content = native_reader.read_layer(self.path, self._manifest, layer, extent, verify=verify, hold_codes=False)
        with in_file(self.path / self.names[layer]):
            return trellis_from_native(content, activation=activation)

    def read_whole(self, layer: int) -> tuple[TrellisSource, TrellisWeights]:
        content = native_reader.read_layer(self.path, self._manifest, layer, hold_codes=False)
        with in_file(self.path / self.names[layer]):
            return trellis_from_native(content, whole=True)

    def _declared(self) -> dict[str, Any]:
        left_out = ("layers", "geometry", "kind", "activation")
        return {key: value for key, value in self._manifest.to_json().items() if key not in left_out}


def open_layer_files(path: str | os.PathLike[str], container: str) -> LayerFiles:
    """Read the manifest of a container.

    Args:
        path: its directory.
        container: its name, `exl3-v1` or `native`.

    Raises:
        FormatNotFoundError: if there is no manifest.
        FormatTypeError, FormatValueError: if it breaks a rule, or there is no container of that name.
    """
    kinds = {"exl3-v1": _ContainerFiles, "native": _NativeFiles}
    if container not in kinds:
        raise FormatValueError(f"container {container!r} has no layer files; those that do: {', '.join(kinds)}")
    return kinds[container](Path(path))


def _opened(path: Path, check: Callable[[LayerFile], None]) -> LayerFile:
    file = LayerFile(path)
    try:
        check(file)
    except FormatError:
        file.close()
        raise
    return file


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flatten(f"{path}.{key}" if path else str(key), part)
    elif isinstance(value, list | tuple):
        yield path, ", ".join(map(str, value)) or "none"
    else:
        yield path, str(value).lower() if isinstance(value, bool) else str(value)
