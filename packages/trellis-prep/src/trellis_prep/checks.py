"""Owns the checks that weights are what their source says, before anything is allocated.  It must not read codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import ArrayView
from trellis_format.rates import TILE
from trellis_format.signs import check_patterns
from trellis_format.slots import row_bytes
from trellis_format.source import CodeLayout, Projection, TrellisSource, TrellisWeights
from trellis_prep.errors import PrepTypeError, PrepValueError
from trellis_prep.layout import local_matrix

__all__ = ["check_weights"]


def check_weights(source: TrellisSource, weights: TrellisWeights) -> None:
    """Accept weights whose shapes, dtypes and rates are those that the source describes.

    Raises:
        PrepTypeError: if `weights` is not `TrellisWeights`, or an array has another dtype.
        PrepValueError: if a shape, a rate, sign patterns or the set of biases differs; names the array, expert and
            projection, and both values.
    """
    if not isinstance(weights, TrellisWeights):
        raise PrepTypeError(f"weights must be TrellisWeights, got {type(weights).__name__}")
    _check_codes(source, weights)
    _check_rates(source, weights.rate)
    if set(weights.biases) != set(source.biased):
        raise PrepValueError(
            f"weights have biases for {', '.join(sorted(weights.biases)) or 'no projection'}, the source says "
            f"{', '.join(sorted(source.biased)) or 'none'}"
        )
    _check_patterns(source, weights.expert_sign_patterns)
    expected = _table_shapes(source)
    for name, array in weights.scale_arrays().items():
        if array.dtype != np.float16:
            raise PrepTypeError(f"{name} must be float16, got {array.dtype}")
        if array.shape != expected[name]:
            raise PrepValueError(f"{name} must be {list(expected[name])}, got {list(array.shape)}")


def _check_patterns(source: TrellisSource, patterns: npt.NDArray[np.uint8] | None) -> None:
    if (source.expert_transform is None) != (patterns is None):
        raise PrepValueError(
            f"sign patterns are {'absent' if patterns is None else 'given'}, the source is "
            f"{'without' if source.expert_transform is None else 'under'} an intermediate Hadamard; they come together"
        )
    if patterns is None:
        return
    try:
        check_patterns(patterns, source.geometry.num_experts)
    except FormatTypeError as error:
        raise PrepTypeError(error.message) from error
    except FormatValueError as error:
        raise PrepValueError(error.message) from error


def _check_codes(source: TrellisSource, weights: TrellisWeights) -> None:
    geometry = source.geometry
    table = weights.codes
    if source.layout is CodeLayout.SLOT_MAJOR:
        _check_rows(source, table)
        return
    if not isinstance(table, tuple):
        raise PrepTypeError(f"codes must be one array per expert and projection, got {type(table).__name__}")
    counts = {len(row) for row in table}
    if len(table) != geometry.num_experts or counts != {len(geometry.projections)}:
        raise PrepValueError(
            f"codes are of {len(table)} experts x {sorted(counts)} projections, the source has "
            f"{geometry.num_experts} x {len(geometry.projections)}"
        )
    matrices = [local_matrix(source, source.extent, index) for index in range(len(geometry.projections))]
    words = (_half_bits(source) * (TILE // 2)).tolist()
    for expert, row in enumerate(table):
        for index, (view, (k, n)) in enumerate(zip(row, matrices, strict=True)):
            shape = (k // TILE, n // TILE, words[expert][index])
            if view.dtype == np.int16 and tuple(view.shape) == shape:
                continue
            where = f"codes of expert {expert} {geometry.projections[index]}"
            if view.dtype != np.int16:
                raise PrepTypeError(f"{where} must be int16, got {view.dtype}")
            raise PrepValueError(f"{where} must be {list(shape)} [k_tiles, n_tiles, 16*K], got {list(view.shape)}")


def _check_rows(source: TrellisSource, codes: object) -> None:
    if not isinstance(codes, ArrayView):
        raise PrepTypeError(f"slot-major codes must be one array, got {type(codes).__name__}")
    if codes.dtype != np.uint8:
        raise PrepTypeError(f"slot-major codes must be uint8, got {codes.dtype}")
    shape = (source.extent.slot_count, row_bytes(source))
    if tuple(codes.shape) != shape:
        raise PrepValueError(f"slot-major codes must be {list(shape)} [slots, row_bytes], got {list(codes.shape)}")


def _check_rates(source: TrellisSource, rate: npt.NDArray[Any]) -> None:
    if rate.dtype != np.uint8:
        raise PrepTypeError(f"rate must be uint8, got {rate.dtype}")
    experts, projections = source.geometry.num_experts, len(source.geometry.projections)
    if rate.shape not in ((1,), (experts,), (1, projections), (experts, projections)):
        raise PrepValueError(
            f"rate must be [1], [{experts}] or [{experts}, {projections}] bytes, got {list(rate.shape)}"
        )
    observed = np.broadcast_to(rate if rate.ndim == 2 else rate[:, None], (experts, projections))
    stated = np.broadcast_to(source.rates.rate_bytes().reshape(len(source.rates.half_bits), -1), observed.shape)
    if (places := np.argwhere(observed != stated)).size:
        expert, index = map(int, places[0])
        raise PrepValueError(
            f"expert {expert} {source.geometry.projections[index]}: observed rate byte "
            f"0x{observed[expert, index]:02x}, the source states K = {source.rates.rate(expert, index)}, which is "
            f"0x{stated[expert, index]:02x}"
        )


def _half_bits(source: TrellisSource) -> npt.NDArray[np.int64]:
    """`[experts, projections] int64`: 2K of each linear."""
    shape = source.geometry.num_experts, len(source.geometry.projections)
    return np.broadcast_to(np.array(source.rates.half_bits, dtype=np.int64), shape)


def _table_shapes(source: TrellisSource) -> dict[str, tuple[int, ...]]:
    geometry, width = source.geometry, source.extent.width
    experts, projections, hidden = geometry.num_experts, len(geometry.projections), geometry.padded_hidden_size
    inputs = 1 if source.joint_input_scales else projections - 1
    shapes: dict[str, tuple[int, ...]] = {
        "input_scales": (inputs, hidden) if source.shared_input_scales else (experts, inputs, hidden),
        "intermediate_scales": (experts, projections, width),
        "output_scales": (hidden,) if source.shared_output_scales else (experts, hidden),
    }
    for projection in source.biased:
        shapes[f"bias.{projection}"] = (experts, hidden if projection is Projection.DOWN else width)
    return shapes
