"""Owns the writing of a container: a layer at a time, each file under a temporary name until it is whole.

It must not know where codes come from: an EXL3 layer and a slot-major one are written by the same function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks.summed_halves import MCG
from trellis_format.container.extents import whole_extent
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer, check_content
from trellis_format.container.manifest import (
    CONTAINER_BITS,
    MANIFEST_NAME,
    SCHEMA,
    LayerEntry,
    Manifest,
    ManifestHead,
    layer_file_name,
)
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.extent import BLOCK, BLOCK_SLOTS, SLOT
from trellis_format.files.layer_file import file_sha256
from trellis_format.plan_codes import plan_codes
from trellis_format.rates import Rate
from trellis_format.schema import parse_model
from trellis_format.slots import row_bytes
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.writer import PlannedTensor, of_array, write_json, write_shard

__all__ = [
    "ROW_ALIGNMENT",
    "container_refusal",
    "layer_entry",
    "plan_head",
    "write_content",
    "write_layer",
    "write_manifest",
]

ROW_ALIGNMENT = 4096
"""Bytes that rows of codes are padded to unless told otherwise: a page, so that rows start on one of their own."""


def container_refusal(source: TrellisSource) -> str | None:
    """Why a container cannot hold a layer without loss, or None where it can."""
    legal = CONTAINER_BITS.get(source.codebook)
    if legal is None:
        return f"codebook {source.codebook} is not one of {', '.join(CONTAINER_BITS)}"
    rates = source.rates.distinct()
    if len(rates) > 1:
        return f"rates K = {', '.join(map(str, rates))} differ within the layer"
    if rates[0] not in [Rate(2 * bits) for bits in legal]:
        return f"codebook {source.codebook} has no K = {rates[0]} in it; legal K: {', '.join(map(str, legal))}"
    geometry = source.geometry
    for wrong, reason in (
        (not geometry.gated, "experts have no gate"),
        (bool(source.biased), f"{', '.join(source.biased)} has a bias"),
        (source.up_divisor != 1.0, f"up is divided by {source.up_divisor:g}"),
        (
            (geometry.hidden_size, geometry.intermediate_size)
            != (geometry.padded_hidden_size, geometry.padded_intermediate_size),
            f"padding to {geometry.padded_hidden_size} x {geometry.padded_intermediate_size} channels",
        ),
    ):
        if wrong:
            return f"{reason}, for which it has no field"
    if not source.extent.is_whole:
        return f"only {source.extent.width} of {source.extent.global_intermediate_size} channels are at hand"
    if source.expert_transform is not None and geometry.intermediate_size % (2 * BLOCK):
        return (
            f"half of {geometry.intermediate_size} channels, where an intermediate Hadamard has a barrier, cuts a block"
        )
    return None


def plan_head(sources: Mapping[int, TrellisSource], *, row_alignment: int = ROW_ALIGNMENT) -> ManifestHead:
    """The manifest, without digests, of a container that holds layers without loss.

    Args:
        sources: the layers by index.
        row_alignment: bytes that rows of codes are padded to a multiple of.

    Raises:
        FormatUnsupportedError: if a layer cannot be held, or two differ in codebook, rate, sizes or transform; has the
            layer and the reason.
        FormatTypeError, FormatValueError: if there is no layer, or an index or the alignment is not legal.
    """
    if not sources:
        raise FormatValueError("a container needs at least one layer")
    first_index, first = next(iter(sorted(sources.items())))
    for layer, source in sorted(sources.items()):
        reason = container_refusal(source)
        if reason is not None:
            raise FormatUnsupportedError(f"layer {layer}: an {SCHEMA} container cannot hold it: {reason}")
        for name in ("codebook", "rates", "geometry", "expert_transform"):
            mine, theirs = getattr(source, name), getattr(first, name)
            if mine != theirs:
                raise FormatUnsupportedError(
                    f"layers {first_index} and {layer}: an {SCHEMA} container has one {name}, not {theirs} and {mine}"
                )
    transform, slots = first.expert_transform, first.geometry.intermediate_size // SLOT
    shared = all(source.shared_input_scales and source.shared_output_scales for source in sources.values())
    head = {
        "kind": "exl3-manifest",
        "schema": SCHEMA,
        "codebook": first.codebook,
        **({"codebook_seed": MCG.multiplier} if first.codebook == MCG.name else {}),
        "geometry": {
            "num_experts": first.geometry.num_experts,
            "hidden_size": first.geometry.hidden_size,
            "intermediate_size": first.geometry.intermediate_size,
            "slot_channels": SLOT,
            "num_slots": slots,
            "moe_layer_indices": sorted(sources),
        },
        "rates": {"structure": "uniform", "bits": first.rates.distinct()[0].half_bits // 2},
        "hadamard": {
            "intermediate_hadamard": transform is not None,
            "per_expert_input_rotations": not shared,
            **({"pre_block": transform.pre_block, "post_block": transform.post_block} if transform else {}),
        },
        "layout": {
            "row_alignment": row_alignment,
            "extent_alignment_slots": BLOCK_SLOTS,
            "extent_barriers": [slots // 2] if transform else [],
        },
    }
    return parse_model(ManifestHead, head)


def write_layer(
    directory: str | os.PathLike[str],
    head: ManifestHead,
    layer: int,
    source: TrellisSource,
    weights: TrellisWeights,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> LayerEntry:
    """Write one layer file.

    Codes are streamed in bands of rows, whichever way they lie; tiles are copied, never decoded.

    Args:
        directory: the container, an existing directory.
        head: the manifest, from `plan_head`.
        layer: index of the layer.
        source: the layer.
        weights: its arrays.
        on_bytes: told of each piece that was written, in bytes.

    Returns:
        File name and digest, for `write_manifest`.

    Raises:
        FormatUnsupportedError: if the container cannot hold the layer.
        FormatValueError: if the layer does not fit the head, a source file is short or changed, or the file cannot be
            written.
    """
    own = plan_head({layer: source}, row_alignment=head.layout.row_alignment)
    for name in ("codebook", "rates"):
        if getattr(own, name) != getattr(head, name):
            raise FormatValueError(f"layer {layer}: {name} {getattr(own, name)} differs from {getattr(head, name)}")
    sizes = [model.geometry.model_dump(exclude={"moe_layer_indices"}) for model in (own, head)]
    if sizes[0] != sizes[1] or own.hadamard.intermediate_hadamard != head.hadamard.intermediate_hadamard:
        raise FormatValueError(f"layer {layer}: geometry {sizes[0]} or transform differs from the head's {sizes[1]}")
    stride = -(-row_bytes(source) // head.layout.row_alignment) * head.layout.row_alignment
    experts, slots = source.geometry.num_experts, source.extent.slot_count
    inputs = _hidden_table(head, weights.input_scales, shared=source.shared_input_scales, experts=experts)
    rotations = weights.intermediate_scales.reshape(experts, 3, slots, SLOT).transpose(2, 0, 1, 3)
    tables: dict[str, npt.NDArray[Any]] = {
        "rotations": rotations,
        "gate_suh": inputs[..., 0, :],
        "up_suh": inputs[..., -1, :],
        "down_svh": _hidden_table(head, weights.output_scales, shared=source.shared_output_scales, experts=experts),
    }
    if weights.expert_sign_patterns is not None:
        tables["sign_pattern"] = weights.expert_sign_patterns
    codes = plan_codes(source, weights, stride)
    planned = [*(of_array(name, np.ascontiguousarray(table)) for name, table in tables.items()), codes]
    return _write(directory, head, layer, planned, on_bytes)


def write_content(
    directory: str | os.PathLike[str],
    content: ContainerLayer | ContainerPairLayer,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> LayerEntry:
    """Write one layer file of content as it is, of any kind that the container has.

    Args:
        directory: the container, an existing directory.
        content: the layer over the whole axis, with its manifest.
        on_bytes: told of each piece that was written, in bytes.

    Raises:
        FormatTypeError, FormatValueError: as `check_content`, except that barriers do not matter here; or if the
            content is not of the whole axis, or the file cannot be written.
    """
    head = content.head
    if content.extent != whole_extent(head):
        raise FormatValueError(f"layer {content.layer}: a layer file holds the whole axis, got {content.extent}")
    check_content(content, barriers=False)
    shape = (content.codes.shape[0], content.codes.shape[1])

    def rows() -> Iterator[npt.NDArray[np.uint8]]:
        row = np.empty(shape[1], dtype=np.uint8)
        for slot in range(shape[0]):
            content.codes.read_box((slice(slot, slot + 1), slice(0, shape[1])), row)
            yield row

    if shape[1] % head.layout.row_alignment:
        raise FormatValueError(
            f"layer {content.layer}: rows of {shape[1]} bytes are not a multiple of row_alignment "
            f"{head.layout.row_alignment}"
        )
    tables = [of_array(name, np.ascontiguousarray(table)) for name, table in content.tables().items()]
    return _write(directory, head, content.layer, [*tables, PlannedTensor("codes", "U8", shape, rows)], on_bytes)


def layer_entry(directory: str | os.PathLike[str], layer: int) -> LayerEntry:
    """File name and digest of a layer file that is there already.

    Raises:
        FormatValueError: if it cannot be read.
    """
    name = layer_file_name(layer)
    return LayerEntry(file=name, sha256=file_sha256(Path(directory) / name))


def write_manifest(
    directory: str | os.PathLike[str], head: ManifestHead, entries: Mapping[int, LayerEntry]
) -> Manifest:
    """Write the manifest, which makes the directory a container; the last file to write.

    Args:
        directory: the container.
        head: from `plan_head`.
        entries: file and digest of every layer of the head.

    Raises:
        FormatValueError: if the entries are not those of the head's layers, or the file cannot be written.
    """
    manifest = Manifest.of(head, entries)
    write_json(Path(directory) / MANIFEST_NAME, manifest.to_json())
    return manifest


def _write(
    directory: str | os.PathLike[str],
    head: ManifestHead,
    layer: int,
    planned: list[PlannedTensor],
    on_bytes: Callable[[int], None] | None,
) -> LayerEntry:
    path = Path(directory) / layer_file_name(layer)
    write_shard(path, planned, metadata=head.layer_metadata(layer), on_bytes=on_bytes)
    return layer_entry(directory, layer)


def _hidden_table(
    head: ManifestHead, scales: npt.NDArray[np.float16], *, shared: bool, experts: int
) -> npt.NDArray[np.float16]:
    """Scales with the experts axis where the manifest has one; all experts get the same where they share it."""
    if not head.hadamard.per_expert_input_rotations:
        return scales
    return np.broadcast_to(scales, (experts, *scales.shape)) if shared else scales
