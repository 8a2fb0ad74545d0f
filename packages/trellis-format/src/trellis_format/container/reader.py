"""Owns the read of a layer file: an extent's rows of it, and the digest of all of it.

It must not interpret what it reads beyond what the manifest declares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.container.extents import check_extent, whole_extent
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer, check_shapes, least_payload_bytes
from trellis_format.container.manifest import PAIR_SLOTS, Manifest
from trellis_format.errors import FormatError, FormatTypeError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.files.boxes import take_box
from trellis_format.files.layer_file import LayerFile

__all__ = ["check_header", "read_layer"]


def read_layer(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    layer: int,
    extent: TrellisExtent | None = None,
    *,
    verify: bool = True,
    hold_codes: bool = True,
) -> ContainerLayer | ContainerPairLayer:
    """Read an extent of one layer.

    With `verify` the whole file passes through the digest, once, and what belongs to the extent is kept as it passes;
    without it no byte outside the extent is read.

    Args:
        directory: the container.
        manifest: its manifest.
        layer: index of the layer.
        extent: the share of the intermediate axis (default: the whole file, to which barriers do not matter).
        verify: whether to compare the file's SHA-256 with the manifest's.
        hold_codes: whether to keep the codes in memory; otherwise they stay in the file and are read from it, by
            position, when they are used.

    Returns:
        The layer; of its own type where rates vary over pairs of records.

    Raises:
        FormatTypeError: if the manifest or the extent is of another type.
        FormatNotFoundError: if the file is missing.
        FormatValueError: if the container has no such layer, the extent is illegal, the file's header, tensors or
            metadata differ from what the manifest declares, or its digest does ("sha256", both).
    """
    for name, value, kind in (("manifest", manifest, Manifest), ("extent", extent, TrellisExtent | None)):
        if not isinstance(value, kind):
            raise FormatTypeError(f"{name} has the wrong type {type(value).__name__}")
    if layer not in manifest.geometry.moe_layer_indices:
        known = ", ".join(map(str, sorted(manifest.geometry.moe_layer_indices)[:16]))
        raise FormatValueError(f"the container has no layer {layer}; its layers: {known}", file=directory)
    share = whole_extent(manifest) if extent is None else extent
    check_extent(manifest, share, barriers=extent is not None)
    entry = manifest.entry(layer)
    file = LayerFile(Path(directory) / entry.file)
    try:
        check_header(manifest, layer, file)
        rows = {name: _rows(name, share, tensor.shape) for name, tensor in file.tensors.items()}
        part = rows["codes"] if hold_codes else rows.pop("codes")
        arrays = file.load(rows, sha256=entry.sha256 if verify else None)
    except FormatError:
        file.close()
        raise
    codes = file.tensors["codes"]
    view = MemoryArray(arrays.pop("codes")) if hold_codes else take_box(codes, (part, slice(0, codes.shape[1])))
    return _content(manifest, layer, share, view, arrays)


def check_header(manifest: Manifest, layer: int, file: LayerFile) -> None:
    """Hold the header of a layer file to the manifest; no data is read.

    Args:
        manifest: of the container.
        layer: index of the layer.
        file: its file.

    Raises:
        FormatValueError: if names, metadata, dtypes or shapes are others than those that the manifest declares, or rows
            of codes are shorter than their payload or not a multiple of `row_alignment`.
    """
    file.check_names(manifest.tensor_names())
    file.check_metadata(manifest.layer_metadata(layer))
    tensors: dict[str, ArrayView] = dict(file.tensors)
    try:
        check_shapes(manifest, layer, manifest.geometry.num_slots, tensors)
        stride, payload = tensors["codes"].shape[1], least_payload_bytes(manifest)
        alignment, least = manifest.layout.row_alignment, "at least " if manifest.rates.pairs else ""
        if stride < payload:
            raise FormatValueError(f"layer {layer}: rows of codes have {stride} bytes, the payload is {least}{payload}")
        if stride % alignment:
            raise FormatValueError(
                f"layer {layer}: rows of codes have {stride} bytes, not a multiple of row_alignment {alignment}; "
                f"nearest legal: {-(-stride // alignment) * alignment}"
            )
    except FormatValueError as error:
        raise FormatValueError(error.message, file=file.path) from error


def _content(
    manifest: Manifest, layer: int, extent: TrellisExtent, codes: ArrayView, tables: dict[str, npt.NDArray[Any]]
) -> ContainerLayer | ContainerPairLayer:
    if np.array_equal(tables["gate_suh"].view(np.uint16), tables["up_suh"].view(np.uint16)):
        tables["up_suh"] = tables["gate_suh"]  # one storage, so that one rotated activation serves both
    kind = ContainerPairLayer if manifest.rates.pairs else ContainerLayer
    return kind(head=manifest, layer=layer, extent=extent, codes=codes, **tables)


def _rows(name: str, extent: TrellisExtent, shape: tuple[int, ...]) -> slice:
    first, end = extent.first_slot, extent.first_slot + extent.slot_count
    if name in ("codes", "rotations"):
        return slice(first, end)
    if name in ("rates_fc1", "rates_fc2"):
        return slice(first // PAIR_SLOTS, end // PAIR_SLOTS)
    return slice(0, shape[0])
