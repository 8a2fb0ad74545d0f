"""Owns the content of one layer of a container, over an extent, and the checks that it fits its manifest.

It must not read files nor know what comes of the content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.container.extents import check_extent
from trellis_format.container.manifest import PAIR_KINDS, PAIR_SLOTS, ManifestHead
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import SLOT, TrellisExtent
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.files.boxes import take_box
from trellis_format.files.host import as_array, as_view
from trellis_format.rate_bytes import unpack_rates
from trellis_format.rates import TILE
from trellis_format.signs import check_patterns

__all__ = [
    "ContainerLayer",
    "ContainerPairLayer",
    "check_content",
    "check_shapes",
    "least_payload_bytes",
    "payload_bytes",
]

_Half = npt.NDArray[np.float16]
_HIDDEN_TABLES = ("gate_suh", "up_suh", "down_svh")
_SCALE_TABLES = ("rotations", *_HIDDEN_TABLES)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Content:
    """What both kinds of layers hold.  Arrays of other libraries are taken without a copy."""

    head: ManifestHead
    layer: int
    extent: TrellisExtent
    codes: ArrayView
    rotations: _Half
    gate_suh: _Half
    up_suh: _Half
    down_svh: _Half
    sign_pattern: npt.NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        for name, kind in (("head", ManifestHead), ("layer", int), ("extent", TrellisExtent)):
            if not isinstance(getattr(self, name), kind):
                found = type(getattr(self, name)).__name__
                raise FormatTypeError(f"{name} of a layer must be {kind.__name__}, got {found}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "codes":
                object.__setattr__(self, field.name, as_view(field.name, value))
            elif field.name not in ("head", "layer", "extent") and value is not None:
                object.__setattr__(self, field.name, as_array(field.name, value))

    def tables(self) -> dict[str, npt.NDArray[Any]]:
        """Every array but the codes, by its name in the file."""
        names = (field.name for field in fields(self) if field.name not in ("head", "layer", "extent", "codes"))
        return {name: array for name in names if (array := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class ContainerLayer(_Content):
    """One layer of one rate.

    Attributes:
        head: the manifest.
        layer: its index.
        extent: the share of the intermediate axis that `codes` and `rotations` hold.
        codes: `[slots, row_stride] uint8`.
        rotations: `[slots, experts, 3, 32] float16`: gate svh, up svh, down suh.
        gate_suh: `[H]` or `[experts, H] float16`, as the manifest declares.
        up_suh: the same.
        down_svh: the same.
        sign_pattern: `[experts] uint8`, 0 to 7, with an intermediate Hadamard; else None.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class ContainerPairLayer(_Content):
    """One layer whose rates vary over pairs of records of 128 channels; fields as `ContainerLayer`, and two more.

    Attributes:
        rates_fc1: `[slots / 8, experts] uint8`, rate bytes of gate and up.
        rates_fc2: `[slots / 8, experts] uint8`, rate bytes of down.
    """

    rates_fc1: npt.NDArray[np.uint8]
    rates_fc2: npt.NDArray[np.uint8]

    def kinds(self) -> list[str]:
        """The kinds of pairs that the manifest declares."""
        return sorted(self.head.rates.pair_kinds or ())


def least_payload_bytes(head: ManifestHead) -> int:
    """Bytes of a row of codes that are tiles: all of them with one rate, the fewest that kinds of pairs allow else."""
    rate, geometry = head.uniform_rate, head.geometry
    kinds = [unpack_rates(PAIR_KINDS[kind]) for kind in head.rates.pair_kinds or ()] if rate is None else [(rate, rate)]
    least = min(sum(part.tile_bytes for part in planes) for planes in kinds)
    return geometry.num_experts * 3 * (geometry.hidden_size // TILE) * least


def payload_bytes(content: ContainerLayer | ContainerPairLayer) -> npt.NDArray[np.int64]:
    """`[slots] int64`: bytes of each row of codes that are tiles; the rest is padding.

    Raises:
        FormatValueError: if a rate byte is none of the declared kinds.
    """
    geometry = content.head.geometry
    plane = geometry.hidden_size // TILE  # bytes of a plane for each byte of a tile
    if not isinstance(content, ContainerPairLayer):
        return np.full(content.extent.slot_count, least_payload_bytes(content.head), dtype=np.int64)
    bytes_of = np.zeros(256, dtype=np.int64)
    for kind in content.kinds():
        bytes_of[PAIR_KINDS[kind]] = sum(plane * rate.tile_bytes for rate in unpack_rates(PAIR_KINDS[kind]))
    for name in ("rates_fc1", "rates_fc2"):
        table = getattr(content, name)
        wrong = np.argwhere(bytes_of[table] == 0)
        if wrong.size:
            pair, expert = (int(index) for index in wrong[0])
            raise FormatValueError(
                f"layer {content.layer}: {name} of pair {pair}, expert {expert} is 0x{table[pair, expert]:02X}; the "
                f"manifest declares {', '.join(content.kinds())}"
            )
    sizes = 2 * bytes_of[content.rates_fc1].sum(axis=1) + bytes_of[content.rates_fc2].sum(axis=1)
    return np.repeat(sizes, PAIR_SLOTS)


def check_shapes(head: ManifestHead, layer: int, slots: int, arrays: Mapping[str, ArrayView]) -> None:
    """Accept tensors that have the dtypes and shapes that the manifest declares; nothing is read.

    Args:
        head: the manifest.
        layer: index, named in errors.
        slots: rows that slot-major tensors have.
        arrays: tensors by name; those of `head.tensor_names()`.

    Raises:
        FormatValueError: if one does not; names it, the observed and the expected dtype or shape.
    """
    geometry = head.geometry
    codes, where = arrays["codes"], f"layer {layer}"
    if codes.dtype != np.uint8:
        raise FormatValueError(f"{where}: codes must be uint8, got {codes.dtype}")
    if len(codes.shape) != 2:
        raise FormatValueError(f"{where}: codes must be 2-D [slots, row_stride], got shape {list(codes.shape)}")
    if codes.shape[0] != slots:
        raise FormatValueError(f"{where}: codes have {codes.shape[0]} rows, one for each slot, the extent {slots}")
    shared = not head.hadamard.per_expert_input_rotations
    hidden = (geometry.hidden_size,) if shared else (geometry.num_experts, geometry.hidden_size)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_HIDDEN_TABLES, hidden)
    shapes["rotations"] = (slots, geometry.num_experts, 3, SLOT)
    shapes["sign_pattern"] = (geometry.num_experts,)
    for name in ("rates_fc1", "rates_fc2"):
        shapes[name] = (slots // PAIR_SLOTS, geometry.num_experts)
    for name, array in arrays.items():
        dtype = np.dtype(np.float16 if name in _SCALE_TABLES else np.uint8)
        if name != "codes" and array.dtype != dtype:
            raise FormatValueError(f"{where}: {name} must be {dtype.name}, got {array.dtype}")
        if name in shapes and array.shape != shapes[name]:
            raise FormatValueError(
                f"{where}: {name} has shape {list(array.shape)}, expected {_shape_text(head, name, shapes[name])}"
            )


def check_content(content: ContainerLayer | ContainerPairLayer, *, barriers: bool = True) -> None:
    """Accept a layer that fits its manifest in every number.

    Args:
        content: the layer.
        barriers: whether its extent may not reach across one; a layer that is only carried may.

    Raises:
        FormatTypeError: if a sign pattern is no array.
        FormatValueError: if the extent is illegal, a dtype, shape or rate byte is wrong, sign patterns are missing or
            not wanted, a scale is not finite, rows are short, or padding is not zero.
    """
    head, where = content.head, f"layer {content.layer}"
    check_extent(head, content.extent, barriers=barriers)
    if isinstance(content.codes, MemoryArray):
        codes = content.codes.read()
        if codes.ndim == 2 and codes.size and codes.strides[1] != codes.itemsize:
            raise FormatValueError(f"{where}: codes must have contiguous rows, got strides {codes.strides}")
    _check_pattern(content)
    tables = content.tables()
    views: dict[str, ArrayView] = {name: MemoryArray(table) for name, table in tables.items()}
    check_shapes(head, content.layer, content.extent.slot_count, {"codes": content.codes, **views})
    for name in _SCALE_TABLES:
        finite = np.isfinite(tables[name])
        if not finite.all():
            index = tuple(int(place) for place in np.argwhere(~finite)[0])
            raise FormatValueError(f"{where}: {name} must be finite, got {tables[name][index]} at {list(index)}")
    _check_padding(content)


def _check_pattern(content: ContainerLayer | ContainerPairLayer) -> None:
    where, wanted = f"layer {content.layer}", content.head.hadamard.intermediate_hadamard
    if content.sign_pattern is None and wanted:
        raise FormatValueError(f"{where}: sign_pattern is required with the intermediate Hadamard")
    if content.sign_pattern is None:
        return
    if not wanted:
        raise FormatValueError(f"{where}: sign_pattern without an intermediate Hadamard in the manifest")
    try:
        check_patterns(content.sign_pattern, content.head.geometry.num_experts)
    except FormatValueError as error:
        raise FormatValueError(f"{where}: {error.message}") from error


def _check_padding(content: ContainerLayer | ContainerPairLayer) -> None:
    stride = content.codes.shape[1]
    for row, payload in enumerate(payload_bytes(content).tolist()):
        slot = content.extent.first_slot + row
        if stride < payload:
            raise FormatValueError(
                f"layer {content.layer}: rows of codes have {stride} bytes, the payload of slot {slot} is {payload}"
            )
        padding = take_box(content.codes, (slice(row, row + 1), slice(payload, stride))).read()[0]
        if padding.any():
            first = int(np.flatnonzero(padding)[0])
            raise FormatValueError(
                f"layer {content.layer}: padding of codes must be zero, slot {slot} has 0x{padding[first]:02X} at byte "
                f"{payload + first}, after a payload of {payload}"
            )


def _shape_text(head: ManifestHead, name: str, shape: tuple[int, ...]) -> str:
    if name not in _HIDDEN_TABLES:
        return str(list(shape))
    geometry = head.geometry
    shared, own = f"[H] = [{geometry.hidden_size}]", f"[E,H] = [{geometry.num_experts}, {geometry.hidden_size}]"
    declared = head.hadamard.per_expert_input_rotations
    first, second = (own, shared) if declared else (shared, own)
    return f"{first}, since per_expert_input_rotations is {str(declared).lower()} ({second} otherwise)"
