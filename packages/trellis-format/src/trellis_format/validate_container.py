"""Owns the validation of containers of layer files, `exl3-v1` and native.  It must not judge EXL3 linears.

Headers first: the manifest, then of each layer file its header, tensors and metadata.  With data: the digest of each
file, finite scales, and zeros where a layer is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from trellis_format.container import manifest as container_manifest
from trellis_format.container import reader as container_reader
from trellis_format.container.adapter import trellis_from_container
from trellis_format.errors import FormatError, FormatUnsupportedError, FormatValueError
from trellis_format.files.header import read_header
from trellis_format.files.layer_file import LayerFile
from trellis_format.findings import Findings
from trellis_format.native import manifest as native_manifest
from trellis_format.native import reader as native_reader
from trellis_format.native.layer import trellis_from_native
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_format.validate_report import Checked

__all__ = ["check_container"]

_Described = tuple[TrellisSource, TrellisWeights]


class _Layers:
    """The layer files of a directory, by what its manifest declares."""

    def __init__(self, directory: Path, container: str) -> None:
        self._directory = directory
        self._manifest: container_manifest.Manifest | native_manifest.NativeManifest
        if container == "native":
            self._manifest = native_manifest.read_manifest(directory)
            self.files = {layer: self._manifest.layers[str(layer)].file for layer in self._manifest.indices}
        else:
            self._manifest = container_manifest.read_manifest(directory)
            layers = sorted(self._manifest.geometry.moe_layer_indices)
            self.files = {layer: self._manifest.entry(layer).file for layer in layers}

    def check_header(self, layer: int) -> int:
        """Check one layer file without its data; returns the number of its tensors."""
        manifest = self._manifest
        with LayerFile(self._directory / self.files[layer]) as file:
            if isinstance(manifest, native_manifest.NativeManifest):
                file.check_names(manifest.tensor_names(manifest.layers[str(layer)].biased))
            else:
                file.check_names(manifest.tensor_names())
            file.check_metadata(manifest.layer_metadata(layer))
            return len(file.tensors)

    def read(self, layer: int) -> _Described:
        """Read one layer file, its digest included."""
        manifest = self._manifest
        if isinstance(manifest, native_manifest.NativeManifest):
            return trellis_from_native(native_reader.read_layer(self._directory, manifest, layer, hold_codes=False))
        return trellis_from_container(container_reader.read_layer(self._directory, manifest, layer, hold_codes=False))


def check_container(
    directory: Path,
    container: str,
    findings: Findings,
    *,
    data: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Hold a container to its rules.

    Args:
        directory: the container.
        container: its name, `exl3-v1` or `native`.
        findings: added to.
        data: whether to read all of each layer file.
        on_progress: told of the bytes that were read and of all bytes to read, again and again.

    Returns:
        What was looked at.
    """
    try:
        layers = _Layers(directory, container)
    except FormatError as error:
        findings.error("container-invalid", error)
        return Checked(shards=0, tensors=0, layers=0, data=False, bytes_read=0)
    tensors, sound = 0, []
    for layer, name in layers.files.items():
        try:
            tensors += layers.check_header(layer)
            sound.append(layer)
        except FormatError as error:
            findings.error("container-invalid", _placed(error, directory / name))
    others = sorted(path for path in directory.glob("*.safetensors") if path.name not in set(layers.files.values()))
    for path in others:
        try:
            tensors += len(read_header(path).entries)
        except FormatError as error:
            findings.error("broken-shard", error)
    sizes = {layer: (directory / layers.files[layer]).stat().st_size for layer in sound}
    done = 0
    for layer in sound if data else ():
        _check_data(layers, layer, directory / layers.files[layer], findings)
        done += sizes[layer]
        if on_progress is not None:
            on_progress(done, sum(sizes.values()))
    return Checked(
        shards=len(layers.files) + len(others), tensors=tensors, layers=len(layers.files), data=data, bytes_read=done
    )


def _check_data(layers: _Layers, layer: int, file: Path, findings: Findings) -> None:
    try:
        source, weights = layers.read(layer)
    except FormatUnsupportedError as error:  # sound, but of a kind that only its own reader takes
        findings.note("not-described", error.message, file=file)
    except FormatError as error:
        code = "payload-hash" if error.message.startswith("sha256") else "container-invalid"
        findings.error(code, _placed(error, file))
    else:
        for wrong in _padding_errors(source, weights, layer, file):
            findings.error("padding-not-zero", wrong)


def _padding_errors(
    source: TrellisSource, weights: TrellisWeights, layer: int, file: Path
) -> Iterator[FormatValueError]:
    geometry = source.geometry
    hidden, intermediate = geometry.hidden_size, geometry.intermediate_size
    middle = len(geometry.projections) - 1
    tables = {"intermediate_scales": (weights.intermediate_scales[:, :middle], intermediate),
              "output_scales": (weights.output_scales, hidden)}  # fmt: skip
    for projection, bias in weights.biases.items():
        tables[f"bias.{projection}"] = (bias, hidden if projection is Projection.DOWN else intermediate)
    for name, (table, true) in tables.items():
        bad = np.argwhere(table[..., true:])
        if len(bad):
            index = [*map(int, bad[0][:-1]), true + int(bad[0][-1])]
            yield FormatValueError(
                f"layer {layer}: channels from {true} on are padding and must be zero; {len(bad)} are not, first at "
                f"{index}",
                file=file,
                tensor=name,
                numbers={"index": index[-1], "count": len(bad), "true": true, "stored": table.shape[-1]},
            )


def _placed(error: FormatError, file: Path) -> FormatError:
    """An error that names the file, whichever its reader named."""
    return error if error.file else type(error)(error.message, file=file, tensor=error.tensor, numbers=error.numbers)
