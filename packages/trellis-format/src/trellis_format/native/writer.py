"""Owns the writing of native checkpoints: a layer at a time, each file under a temporary name until it is whole.

It must not know where codes come from: EXL3 linears and slot-major rows are written by the same function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.files.layer_file import file_sha256
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.native.config import TrellisConfig, parse_config
from trellis_format.native.layer import NativeLayer, trellis_from_native
from trellis_format.native.manifest import (
    MANIFEST_NAME,
    SCHEMA,
    NativeActivation,
    NativeEntry,
    NativeGeometry,
    NativeHead,
    NativeManifest,
    layer_file_name,
)
from trellis_format.native.scales import Boundary
from trellis_format.plan_codes import plan_codes
from trellis_format.rate_table import RateTable
from trellis_format.schema import emit_json, parse_model
from trellis_format.slots import iterate_rows, row_bytes
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.writer import PlannedTensor, of_array, write_json, write_shard

__all__ = ["layer_entry", "plan_head", "write_layer", "write_manifest", "write_native_layer"]

_Arrays = dict[str, npt.NDArray[Any]]


def plan_head(sources: Mapping[int, TrellisSource]) -> NativeHead:
    """The manifest, without digests, of a native checkpoint that holds layers without loss.

    Args:
        sources: the layers by index.

    Raises:
        FormatUnsupportedError: if two layers differ in codebook, sizes, activation or transform, or one is only a
            share of its axis; has the layers and both values.
        FormatValueError: if there is no layer.
    """
    if not sources:
        raise FormatValueError("a native checkpoint needs at least one layer")
    first_index, first = next(iter(sorted(sources.items())))
    for layer, source in sorted(sources.items()):
        if not source.extent.is_whole:
            raise FormatUnsupportedError(f"layer {layer}: only {source.extent} of its axis is at hand")
        for name in ("codebook", "geometry", "activation", "expert_transform"):
            mine, theirs = getattr(source, name), getattr(first, name)
            if mine != theirs:
                raise FormatUnsupportedError(
                    f"layers {first_index} and {layer}: a native checkpoint has one {name}, not {theirs} and {mine}"
                )
    head = {
        "kind": "trellis-manifest",
        "schema": SCHEMA,
        "quantization_config": _config(list(sources.values())).quantization_config(),
        "geometry": emit_json(NativeGeometry.of(first.geometry)),
    }
    if first.activation is not None:
        head["activation"] = emit_json(NativeActivation.of(first.activation))
    return parse_model(NativeHead, head)


def write_layer(
    directory: str | os.PathLike[str],
    head: NativeHead,
    layer: int,
    source: TrellisSource,
    weights: TrellisWeights,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> NativeEntry:
    """Write one layer file.

    Codes are streamed in bands of rows, whichever way they lie; tiles are copied, never decoded.

    Args:
        directory: the checkpoint, an existing directory.
        head: the manifest, from `plan_head` over this layer and others.
        layer: index of the layer.
        source: the layer.
        weights: its arrays.
        on_bytes: told of each piece that was written, in bytes.

    Returns:
        File name, digest and what only this layer has, for `write_manifest`.

    Raises:
        FormatUnsupportedError: if the layer is only a share of its axis.
        FormatValueError: if the layer does not fit the head, a source file is short or changed, or the file cannot be
            written.
    """
    own = plan_head({layer: source})
    if (own.config.codebook, own.config.transform, own.geometry) != (
        head.config.codebook,
        head.config.transform,
        head.geometry,
    ):
        raise FormatValueError(f"layer {layer}: {own.config.codebook} of {own.geometry} differs from the head's")
    experts, scale = source.geometry.num_experts, head.config.scale
    inputs = _own_rows(weights.input_scales, source.shared_input_scales, scale.input_scales.vectors, experts)
    arrays: _Arrays = {
        "rate": _rate_tensor(head, source),
        "input_scales.vectors": inputs[..., 0, :] if source.joint_input_scales and inputs.shape[-2] == 1 else inputs,
        "intermediate_scales.vectors": weights.intermediate_scales,
        "output_scales.vectors": _own_rows(
            weights.output_scales, source.shared_output_scales, scale.output_scales.vectors, experts
        ),
        **{f"bias.{name}": bias for name, bias in weights.biases.items()},
    }
    if weights.expert_sign_patterns is not None:
        arrays["expert_sign_patterns"] = weights.expert_sign_patterns
    _write(directory, head, layer, arrays, plan_codes(source, weights, row_bytes(source)), on_bytes)
    return layer_entry(directory, layer, source)


def write_native_layer(
    directory: str | os.PathLike[str],
    head: NativeHead,
    layer: int,
    content: NativeLayer,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> NativeEntry:
    """Write one layer file of native content as it is, gains included.

    Args:
        directory: the checkpoint, an existing directory.
        head: the manifest.
        layer: index of the layer.
        content: the layer over the whole axis.
        on_bytes: told of each piece that was written, in bytes.

    Raises:
        FormatTypeError, FormatUnsupportedError, FormatValueError: as `trellis_from_native`; or if the content is not of
            the head's configuration, sizes or whole axis, or the file cannot be written.
    """
    source, weights = trellis_from_native(content)
    if content.config != head.config or content.geometry != head.geometry.geometry() or not content.extent.is_whole:
        raise FormatValueError(f"layer {layer}: configuration, sizes or extent differ from the head's")
    arrays: _Arrays = {"rate": content.rate}
    for boundary in Boundary:
        factors = getattr(content, boundary.value)
        arrays[f"{boundary}.vectors"] = factors.vectors
        if factors.gains is not None:
            arrays[f"{boundary}.gains"] = factors.gains.reshape(factors.gains.shape or (1,))
    arrays |= {f"bias.{name}": bias for name, bias in content.biases.items()}
    if content.expert_sign_patterns is not None:
        arrays["expert_sign_patterns"] = content.expert_sign_patterns

    def rows() -> Iterator[npt.NDArray[np.uint8]]:
        yield from iterate_rows(source, weights, row_bytes(source))

    codes = PlannedTensor("codes", "U8", (source.extent.slot_count, row_bytes(source)), rows)
    _write(directory, head, layer, arrays, codes, on_bytes)
    return layer_entry(directory, layer, source)


def layer_entry(directory: str | os.PathLike[str], layer: int, source: TrellisSource) -> NativeEntry:
    """The entry of a layer file that is there already.

    Raises:
        FormatValueError: if it cannot be read.
    """
    name = layer_file_name(layer)
    entry: dict[str, Any] = {"file": name, "sha256": file_sha256(Path(directory) / name)}
    if source.biased:
        entry["biased"] = tuple(projection.value for projection in source.biased)
    if source.up_divisor != 1.0:
        entry["up_divisor"] = source.up_divisor
    return NativeEntry(**entry)


def write_manifest(
    directory: str | os.PathLike[str], head: NativeHead, entries: Mapping[int, NativeEntry]
) -> NativeManifest:
    """Write the manifest, which makes the directory a native checkpoint; the last file to write.

    Args:
        directory: the checkpoint.
        head: from `plan_head`.
        entries: the entry of every layer.

    Raises:
        FormatValueError: if there is no layer, or the file cannot be written.
    """
    manifest = NativeManifest.of(head, entries)
    write_json(Path(directory) / MANIFEST_NAME, manifest.to_json())
    return manifest


def _write(
    directory: str | os.PathLike[str],
    head: NativeHead,
    layer: int,
    arrays: _Arrays,
    codes: PlannedTensor,
    on_bytes: Callable[[int], None] | None,
) -> None:
    planned = [*(of_array(name, np.ascontiguousarray(array)) for name, array in arrays.items()), codes]
    path = Path(directory) / layer_file_name(layer)
    write_shard(path, planned, metadata=head.layer_metadata(layer), on_bytes=on_bytes)


def _config(sources: list[TrellisSource]) -> TrellisConfig:
    def side(shared: bool) -> dict[str, str]:
        return {"vectors": "per_layer" if shared else "per_expert", "gains": "none"}

    transform = sources[0].expert_transform
    expert: dict[str, Any] = {"kind": "none"}
    if transform is not None:
        expert = {
            "kind": "intermediate_hadamard",
            "pre_block_size": transform.pre_block,
            "post_block_size": transform.post_block,
            "sign_pattern_granularity": "per_expert",
        }
    return parse_config(
        {
            "version": 2,
            "codebook": sources[0].codebook,
            "rate": {"granularity": _granularity([source.rates for source in sources])},
            "scale": {
                "input_scales": side(all(source.shared_input_scales for source in sources)),
                "intermediate_scales": side(False),
                "output_scales": side(all(source.shared_output_scales for source in sources)),
            },
            "transform": {
                "projection": {"kind": "scaled_hadamard", "block_size": HADAMARD_BLOCK},
                "expert": expert,
            },
        }
    )


def _granularity(tables: list[RateTable]) -> str:
    if any(len(table.half_bits[0]) > 1 for table in tables):
        return "per_expert_projection"
    if any(len(table.half_bits) > 1 for table in tables):
        return "per_expert"
    return "uniform" if len(set(tables)) == 1 else "per_layer"


def _rate_tensor(head: NativeHead, source: TrellisSource) -> npt.NDArray[np.uint8]:
    geometry = source.geometry
    projections = len(geometry.projections)
    shape = head.config.rate.layer_shape(geometry.num_experts, geometry.padded_intermediate_size, projections)
    rates = source.rates.rate_bytes()
    own = rates if rates.ndim == 2 else rates[:, None]
    if len(shape) == 2:
        return np.ascontiguousarray(np.broadcast_to(own, shape))
    if own.shape[1] != 1 or own.shape[0] not in (1, shape[0]):
        raise FormatValueError(f"rates {source.rates} do not fit the head's granularity {head.config.rate.granularity}")
    return np.ascontiguousarray(np.broadcast_to(own[:, 0], shape))


def _own_rows(scales: npt.NDArray[np.float16], shared: bool, granularity: str, experts: int) -> npt.NDArray[np.float16]:
    """Scales with an axis of experts where the head declares one; all experts get the same where they share it."""
    if granularity == "per_expert":
        return np.broadcast_to(scales, (experts, *scales.shape)) if shared else scales
    if not shared:
        raise FormatValueError(f"experts have scales of their own, the head declares {granularity} ones")
    return scales
