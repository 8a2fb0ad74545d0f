"""Owns the validation of containers of layer files, `exl3-v1` and native.  It must not judge EXL3 linears.

Headers first: the manifest, then of each layer file its header, tensors and metadata.  With data: the digest of each
file, finite scales, and zeros where a layer is padded.  The files beside the layers are held to what a conversion reads
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from trellis_format.checkpoint import CONFIG_NAME
from trellis_format.convert_files import KEPT_NAMES
from trellis_format.convert_names import NAMES_FILE, read_names
from trellis_format.errors import FormatError, FormatUnsupportedError, FormatValueError
from trellis_format.files.header import read_header
from trellis_format.files.strict_json import read_json
from trellis_format.findings import Findings
from trellis_format.layer_files import LayerFiles, open_layer_files
from trellis_format.model_config import parse_model_config
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_format.validate_report import Checked

__all__ = ["check_container"]


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
        layers = open_layer_files(directory, container)
    except FormatError as error:
        findings.error("container-invalid", error)
        return Checked(shards=0, tensors=0, layers=0, data=False, bytes_read=0)
    tensors, sound = 0, []
    for layer, name in layers.names.items():
        try:
            with layers.open(layer) as file:
                tensors += len(file.tensors)
            sound.append(layer)
        except FormatError as error:
            findings.error("container-invalid", _placed(error, directory / name))
    others = sorted(path for path in directory.glob("*.safetensors") if path.name not in set(layers.names.values()))
    tensors += _check_outside(others, findings)
    _check_files(directory, layers, findings)
    sizes = {layer: (directory / layers.names[layer]).stat().st_size for layer in sound}
    done = 0
    for layer in sound if data else ():
        _check_data(layers, layer, directory / layers.names[layer], findings)
        done += sizes[layer]
        if on_progress is not None:
            on_progress(done, sum(sizes.values()))
    return Checked(
        shards=len(layers.names) + len(others), tensors=tensors, layers=len(layers.names), data=data, bytes_read=done
    )


def _check_outside(shards: list[Path], findings: Findings) -> int:
    """The number of tensors outside of layers, whose names must be distinct."""
    holders: dict[str, Path] = {}
    for path in shards:
        try:
            for name in read_header(path).entries:
                if name in holders:
                    text = f"{holders[name].name} has a tensor of this name too; names outside of layers are distinct"
                    findings.error("broken-checkpoint", FormatValueError(text, file=path, tensor=name))
                holders[name] = path
        except FormatError as error:
            findings.error("broken-shard", error)
    return len(holders)


def _check_files(directory: Path, layers: LayerFiles, findings: Findings) -> None:
    try:
        kept = read_names(directory)
        for layer in layers.names:
            for projection in layers.projections if layer in kept else ():
                kept[layer].module(0, projection)
    except FormatError as error:
        findings.error("json-invalid", _placed(error, directory / NAMES_FILE))
    for name in (CONFIG_NAME, *KEPT_NAMES.values()):
        path = directory / name
        try:
            value = read_json(path) if path.exists() else {}
            if not isinstance(value, dict):
                raise FormatValueError(f"must hold a JSON object, got {type(value).__name__}", file=path)
        except FormatError as error:
            findings.error("json-invalid", error)
            continue
        try:
            if name == CONFIG_NAME:
                parse_model_config(value, file=str(path))
        except FormatError as error:
            findings.error("config-invalid", error)


def _check_data(layers: LayerFiles, layer: int, file: Path, findings: Findings) -> None:
    try:
        source, weights = layers.read_whole(layer)
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
