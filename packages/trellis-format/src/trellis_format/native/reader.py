"""Owns the read of a native layer file: an extent's rows of codes, the small tables, and the digest of all of it.

It must not interpret what it reads; `trellis_from_native` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatError, FormatTypeError, FormatValueError
from trellis_format.extent import SLOT, TrellisExtent
from trellis_format.files.arrays import ArrayView, FileArray, MemoryArray
from trellis_format.files.boxes import take_box
from trellis_format.files.layer_file import LayerFile
from trellis_format.native.layer import NativeLayer, rates_of
from trellis_format.native.manifest import NativeManifest
from trellis_format.native.scales import Boundary, ScaleFactors, check_scale_shapes
from trellis_format.rates import Rate
from trellis_format.slots import section_bytes
from trellis_format.source import Projection

__all__ = ["check_header", "read_layer"]


def read_layer(
    directory: str | os.PathLike[str],
    manifest: NativeManifest,
    layer: int,
    extent: TrellisExtent | None = None,
    *,
    verify: bool = True,
    hold_codes: bool = True,
) -> NativeLayer:
    """Read an extent of one layer.

    With `verify` the whole file passes through the digest, once, and what is wanted is kept as it passes; without it
    only the extent's rows of codes and the tables are read.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        layer: index of the layer.
        extent: the share of the intermediate axis (default: all of it).
        verify: whether to compare the file's SHA-256 with the manifest's.
        hold_codes: whether to keep the codes in memory; otherwise they stay in the file and are read from it, by
            position, when they are used.

    Raises:
        FormatTypeError: if the manifest or the extent is of another type.
        FormatNotFoundError: if the file is missing.
        FormatValueError: if there is no such layer, the extent cuts a block or is of another axis, the file's header,
            tensors or metadata differ from what the manifest declares, or its digest does ("sha256", both).
    """
    for name, value, kind in (("manifest", manifest, NativeManifest), ("extent", extent, TrellisExtent | None)):
        if not isinstance(value, kind):
            raise FormatTypeError(f"{name} has the wrong type {type(value).__name__}")
    entry = manifest.layers.get(str(layer))
    if entry is None:
        known = ", ".join(map(str, manifest.indices[:16]))
        raise FormatValueError(f"the checkpoint has no layer {layer}; its layers: {known}", file=directory)
    share = _share(manifest, extent)
    file = LayerFile(Path(directory) / entry.file)
    try:
        check_header(manifest, layer, file)
        rows = {name: slice(0, tensor.shape[0]) for name, tensor in file.tensors.items() if tensor.shape}
        rows["codes"] = slice(share.first_slot, share.first_slot + share.slot_count)
        part = rows["codes"] if hold_codes else rows.pop("codes")
        arrays = file.load(rows, sha256=entry.sha256 if verify else None)
    except FormatError:
        file.close()
        raise
    codes: ArrayView = file.tensors["codes"]
    codes = MemoryArray(arrays["codes"]) if hold_codes else take_box(codes, (part, slice(0, codes.shape[1])))
    return _layer(manifest, layer, share, codes, arrays)


def _share(manifest: NativeManifest, extent: TrellisExtent | None) -> TrellisExtent:
    axis = manifest.geometry.padded_intermediate_size
    share = TrellisExtent.whole(axis) if extent is None else extent
    if share.global_intermediate_size != axis:
        raise FormatValueError(
            f"extent is of an axis of {share.global_intermediate_size} channels, the checkpoint of one of {axis}"
        )
    share.check_blocks()
    return share


def check_header(manifest: NativeManifest, layer: int, file: LayerFile) -> None:
    """Hold the header of a layer file to the manifest; only the rate bytes are read.

    What is large is held before anything is allocated; the rest is bounded by the tables' shapes.

    Args:
        manifest: of the checkpoint.
        layer: index of a layer that it lists.
        file: its file.

    Raises:
        FormatUnsupportedError: if rates come in groups, or transforms are not handled.
        FormatValueError: if names, metadata, dtypes or shapes are others than those that the manifest declares, a rate
            byte is illegal, or rows of codes are not exactly their payload.
    """
    file.check_names(manifest.tensor_names(manifest.layers[str(layer)].biased))
    file.check_metadata(manifest.layer_metadata(layer))
    geometry = manifest.geometry.geometry()
    experts, projections = geometry.num_experts, len(geometry.projections)
    slots = geometry.padded_intermediate_size // SLOT
    widest = max(geometry.padded_hidden_size, geometry.padded_intermediate_size)
    for name, tensor in file.tensors.items():
        kind = "F16" if name.endswith((".vectors", ".gains")) or name.startswith("bias.") else "U8"
        if tensor.entry.dtype != kind:
            raise _refuse(tensor, f"must be {'float16' if kind == 'F16' else 'uint8'}, got {tensor.entry.dtype}")
        if name == "codes":
            if len(tensor.shape) != 2 or tensor.shape[0] != slots:
                raise _refuse(tensor, f"codes must be 2-D with {slots} slot rows, got shape {list(tensor.shape)}")
        elif tensor.nbytes > experts * projections * widest * 2:
            raise _refuse(tensor, f"shape {list(tensor.shape)} is larger than any table of {experts} experts can be")
        elif not tensor.shape:
            raise _refuse(tensor, "a scalar is stored as [1]")
    _check_tables(manifest, file)
    _check_row(manifest, file)


def _check_tables(manifest: NativeManifest, file: LayerFile) -> None:
    geometry = manifest.geometry.geometry()
    experts, projections = geometry.num_experts, len(geometry.projections)
    hidden, middle = geometry.padded_hidden_size, geometry.padded_intermediate_size
    sizes = {
        Boundary.INPUT: (projections - 1, hidden),
        Boundary.INTERMEDIATE: (projections, middle),
        Boundary.OUTPUT: (1, hidden),
    }
    for name, declared in manifest.config.scale:
        parts = {part: file.tensors.get(f"{name}.{part}") for part in ("vectors", "gains")}
        shapes = {part: tensor.shape for part, tensor in parts.items() if tensor is not None}
        try:
            check_scale_shapes(Boundary(name), shapes, declared, experts, *sizes[Boundary(name)])
        except FormatValueError as error:
            raise FormatValueError(error.message, file=file.path) from error
    rows = {"expert_sign_patterns": (experts,), "bias.gate": (experts, middle), "bias.up": (experts, middle),
            "bias.down": (experts, hidden)}  # fmt: skip
    for name, shape in rows.items():
        if name in file.tensors and file.tensors[name].shape != shape:
            found = list(file.tensors[name].shape)
            raise _refuse(file.tensors[name], f"{name} must have shape {list(shape)}, got {found}")


def _check_row(manifest: NativeManifest, file: LayerFile) -> None:
    geometry = manifest.geometry.geometry()
    half_bits = rates_of(manifest.config, geometry, file.tensors["rate"].read()).half_bits
    # without a loop over experts, whose number is only a claim until the row has their bytes
    experts = geometry.num_experts if len(half_bits) == 1 else 1
    projections = len(geometry.projections) if len(half_bits[0]) == 1 else 1
    size = section_bytes(geometry.padded_hidden_size, Rate(2)) // 2 * sum(map(sum, half_bits)) * experts * projections
    codes = file.tensors["codes"]
    if codes.shape[1] != size:
        raise _refuse(codes, f"rows have {codes.shape[1]} bytes, their payload is exactly {size}")


def _layer(
    manifest: NativeManifest, layer: int, extent: TrellisExtent, codes: ArrayView, arrays: dict[str, npt.NDArray[Any]]
) -> NativeLayer:
    entry = manifest.layers[str(layer)]
    channels = extent.channels
    middle = arrays["intermediate_scales.vectors"]
    arrays["intermediate_scales.vectors"] = np.ascontiguousarray(middle[..., channels])
    scales = {
        boundary: ScaleFactors(arrays[f"{boundary}.vectors"], arrays.get(f"{boundary}.gains")) for boundary in Boundary
    }
    biases = {}
    for name in entry.biased:
        bias = arrays[f"bias.{name}"]
        biases[Projection(name)] = bias if name == "down" else np.ascontiguousarray(bias[..., channels])
    return NativeLayer(
        config=manifest.config,
        geometry=manifest.geometry.geometry(),
        extent=extent,
        codes=codes,
        rate=arrays["rate"],
        input_scales=scales[Boundary.INPUT],
        intermediate_scales=scales[Boundary.INTERMEDIATE],
        output_scales=scales[Boundary.OUTPUT],
        expert_sign_patterns=arrays.get("expert_sign_patterns"),
        biases=biases,
        up_divisor=1.0 if entry.up_divisor is None else entry.up_divisor,
        activation=None if manifest.activation is None else manifest.activation.activation(),
    )


def _refuse(tensor: FileArray, message: str) -> FormatValueError:
    return FormatValueError(message, file=tensor.file, tensor=tensor.entry.name)
