"""Owns the way from a checkpoint of any container to one described layer.  It must not know who runs it.

What a container has no field for, the activation and the true widths of padded layers, is taken from the model's
`config.json` beside it, where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trellis_format.activations import Activation
from trellis_format.checkpoint import CONFIG_NAME, open_checkpoint
from trellis_format.detect import container_of
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.exl3.names import DEFAULT_PATTERN
from trellis_format.extent import TrellisExtent
from trellis_format.files.strict_json import read_json
from trellis_format.layer_files import LayerFiles, open_layer_files
from trellis_format.model_config import ModelConfig, parse_model_config, true_width
from trellis_format.source import ExpertGeometry, TrellisSource, TrellisWeights

__all__ = ["open_layer_source", "stated_activation"]


def open_layer_source(
    path: str | os.PathLike[str],
    layer: int,
    *,
    extent: TrellisExtent | None = None,
    pattern: str | None = None,
    activation: Activation | str | None = None,
    ignore_index: bool = False,
    ignore_method: bool = False,
    verify: bool = True,
) -> tuple[TrellisSource, TrellisWeights]:
    """Describe one layer of a checkpoint of any container; codes stay in its files.

    Args:
        path: directory of an EXL3 checkpoint, of an `exl3-v1` container, or of a native one.
        layer: index of the layer.
        extent: the share of the intermediate axis of a container's layer (default: all of it); EXL3 linears are always
            described whole, since each is read in parts anyway.
        pattern: regular expression of expert names in EXL3 (default: that of `trellis_format.exl3.names`).
        activation: the law between the GEMMs, instead of what a manifest or `config.json` states.  Of a name, the
            constants are those that the checkpoint states for this law, where they are legal, else those of
            `Activation.named`.
        ignore_index: do not compare EXL3 shards with the index.
        ignore_method: trust the tensors of EXL3 shards where a configuration states another `quant_method`.
        verify: whether to compare the digest of a container's layer file, which reads all of it once.

    Returns:
        The source and the weights over the extent.  The source's activation is None where nothing
        states one that is known.

    Raises:
        FormatNotFoundError: if there is no such directory or file.
        FormatTypeError: if the index or the activation has the wrong type.
        FormatUnsupportedError: if the layer mixes codebooks, has pair rates or transforms that are not handled, or was
            quantised under an intermediate Hadamard and no extent is given: its halves have an input vector each.
        FormatValueError: if there is no such layer, a file breaks a rule, or the extent is not legal.
    """
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise FormatTypeError(f"layer must be an int, got {type(layer).__name__}")
    if not isinstance(activation, Activation | str | None):
        raise FormatTypeError(f"activation must be an Activation or a name, got {type(activation).__name__}")
    container = container_of(path)
    if container == "exl3":
        if extent is not None:
            raise FormatValueError("an extent is given; EXL3 linears are described whole and cut when they are read")
        checkpoint = open_checkpoint(path, ignore_index=ignore_index)
        name = DEFAULT_PATTERN if pattern is None else pattern
        if isinstance(activation, str):
            config = parse_model_config(checkpoint.config, file=str(checkpoint.path / CONFIG_NAME))
            activation = _named_law(activation, config.activation)
        found = find_layer(checkpoint, layer, pattern=name, ignore_method=ignore_method, activation=activation)
        return trellis_from_exl3(found, activation=activation)
    return _open_container(open_layer_files(path, container), layer, extent, activation, verify)


def stated_activation(path: str | os.PathLike[str]) -> str:
    """What the configuration beside a checkpoint states as activation, in words: the key and its value.

    Args:
        path: directory of the checkpoint.

    Raises:
        FormatError: if the configuration breaks a rule.
    """
    config = _config(Path(path))
    key = config.activation_key() or "hidden_act"
    return f"{key} is {getattr(config, key)!r}"


def _open_container(
    files: LayerFiles, layer: int, extent: TrellisExtent | None, activation: Activation | str | None, verify: bool
) -> tuple[TrellisSource, TrellisWeights]:
    if extent is None and files.transform is not None:
        raise FormatUnsupportedError(
            f"layer {layer} was quantised under an {files.transform}, whose halves have input vectors of their own; it "
            "can be described a half of its slots at a time, cut at slot "
            f"{', '.join(map(str, files.barriers)) or 'num_slots / 2'}",
            file=files.path,
        )
    config = _config(files.path)
    if isinstance(activation, str):
        activation = _named_law(activation, lambda: files.activation or config.activation())
    law = activation or files.activation or config.activation()
    source, weights = files.read(layer, extent, activation=law, verify=verify)
    return replace(source, geometry=_true_geometry(source, config)), weights


def _named_law(name: str, stated: Callable[[], Activation | None]) -> Activation:
    """The law of a name, with the constants of what is stated where that is the same law and legal."""
    named = Activation.named(name)
    try:
        law = stated()
    except FormatValueError:
        return named  # what is stated breaks a rule, and is not what was asked for
    return law if law is not None and law.kind == name else named


def _config(directory: Path) -> ModelConfig:
    file = directory / CONFIG_NAME
    if not file.exists():
        return ModelConfig()
    config = read_json(file)
    if not isinstance(config, dict):
        raise FormatValueError(f"must hold a JSON object, got {type(config).__name__}", file=file)
    return parse_model_config(config, file=str(file))


def _true_geometry(source: TrellisSource, config: ModelConfig) -> ExpertGeometry:
    """The sizes, with true widths from the configuration where the container states none of its own."""
    geometry = source.geometry
    stored = (geometry.padded_hidden_size, geometry.padded_intermediate_size)
    if (geometry.hidden_size, geometry.intermediate_size) != stored or source.expert_transform is not None:
        return geometry
    hidden, intermediate = config.hidden_sizes(), config.expert_widths()
    return replace(
        geometry, hidden_size=true_width(stored[0], hidden), intermediate_size=true_width(stored[1], intermediate)
    )
