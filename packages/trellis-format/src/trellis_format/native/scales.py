"""Owns the scales of one boundary as they are stored: vectors over channels, and gains on top of them.

It must not know codes or files.  Whether experts share them is what the configuration declares; shapes are held to it
and never decide, because with one expert they coincide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.host import as_array
from trellis_format.native.config import BoundaryConfig

__all__ = ["Boundary", "ScaleFactors", "check_scale_shapes", "resolve_scales"]

_Half = npt.NDArray[np.float16]


class Boundary(StrEnum):
    """Where scales are applied; the value is the key in the configuration."""

    INPUT = "input_scales"
    """Before gate and up: one row for both, or one for each."""
    INTERMEDIATE = "intermediate_scales"
    """Between the two GEMMs: a row for each projection."""
    OUTPUT = "output_scales"
    """After down: one row."""


@dataclass(frozen=True, eq=False)
class ScaleFactors:
    """Stored scales of one boundary; the effective ones are their float16 product.

    Args:
        vectors: `[channels]`, with an axis of rows (gate, up or gate, up, down) before it where the boundary has
            several, and an axis of experts before that where each has its own; `float16`.
        gains: a value, `[1]` or `[rows]`, with an axis of experts before where each has its own; `float16`; or None.

    Raises:
        FormatTypeError: if an array is no array or not float16.
        FormatValueError: if an array is not on the CPU or not contiguous.
    """

    vectors: _Half
    gains: _Half | None = None

    def __post_init__(self) -> None:
        for name in ("vectors", "gains"):
            value = getattr(self, name)
            if name == "gains" and value is None:
                continue
            array = as_array(name, value)
            if array.dtype != np.float16:
                raise FormatTypeError(f"{name} must be float16, got {array.dtype}")
            if not array.flags.c_contiguous:
                raise FormatValueError(f"{name} must be contiguous, got strides {array.strides}")
            object.__setattr__(self, name, array)


def resolve_scales(
    boundary: Boundary, factors: ScaleFactors, declared: BoundaryConfig, num_experts: int, rows: int, channels: int
) -> tuple[_Half, bool]:
    """The effective scales of a boundary.

    Args:
        boundary: where.
        factors: what is stored.
        declared: what the configuration says about it.
        num_experts: experts of the layer.
        rows: rows of the boundary: fc1 projections for the input, all projections for the intermediate, 1 for the
            output.
        channels: channels of a row.

    Returns:
        `[experts, rows, channels] float16` and False, or without the experts axis and True where experts share them.
        The input has one row where gate and up share it.

    Raises:
        FormatValueError: if gains are given and not declared or the reverse ("gains"), a shape does not fit what is
            declared, or a value or product is not finite; names boundary, both shapes or the index.
    """
    if (declared.gains == "none") != (factors.gains is None):
        wanted = "none are declared" if declared.gains == "none" else f"{declared.gains} gains are declared"
        raise FormatValueError(f"{boundary}: gains are {'missing' if factors.gains is None else 'given'}, but {wanted}")
    own_vectors, own_gains = declared.vectors == "per_expert", declared.gains == "per_expert"
    shapes = {"vectors": factors.vectors.shape}
    if factors.gains is not None:
        shapes["gains"] = factors.gains.shape
    check_scale_shapes(boundary, shapes, declared, num_experts, rows, channels)
    lead = (num_experts,) if own_vectors else ()
    _check_finite(boundary, "vectors", factors.vectors)
    vectors = factors.vectors.reshape(*lead, -1, channels)
    if factors.gains is None:
        return vectors, not own_vectors
    _check_finite(boundary, "gains", factors.gains)
    lead = (num_experts,) if own_gains else ()
    gains = factors.gains.reshape(*lead, -1, 1)
    with np.errstate(over="ignore"):
        product: _Half = vectors * gains
    _check_finite(boundary, "vectors * gains", product)
    return product, not (own_vectors or own_gains)


def check_scale_shapes(
    boundary: Boundary,
    shapes: Mapping[str, tuple[int, ...]],
    declared: BoundaryConfig,
    num_experts: int,
    rows: int,
    channels: int,
) -> None:
    """Accept the shapes of what a boundary stores; no data is needed.

    Args:
        boundary: where.
        shapes: of `vectors`, and of `gains` where there are any.
        declared: what the configuration says about it.
        num_experts: experts of the layer.
        rows: rows of the boundary, as `resolve_scales` takes them.
        channels: channels of a row.

    Raises:
        FormatValueError: if a shape does not fit what is declared; names boundary, observed and legal shapes.
    """
    lead = (num_experts,) if declared.vectors == "per_expert" else ()
    legal = [(*lead, rows, channels)]
    if boundary is not Boundary.INTERMEDIATE:
        legal.append((*lead, channels))
    if shapes["vectors"] not in legal:
        raise _misfit(boundary, "vectors", declared.vectors, shapes["vectors"], legal)
    if "gains" in shapes:
        lead = (num_experts,)
        legal = [lead, (*lead, rows)] if declared.gains == "per_expert" else [(), (1,), (rows,)]
        if shapes["gains"] not in legal:
            raise _misfit(boundary, "gains", declared.gains, shapes["gains"], legal)


def _misfit(
    boundary: Boundary, name: str, granularity: str, shape: tuple[int, ...], legal: list[tuple[int, ...]]
) -> FormatValueError:
    expected = " or ".join(str(list(one)) for one in dict.fromkeys(legal))
    return FormatValueError(f"{boundary}: {granularity} {name} must have shape {expected}, got {list(shape)}")


def _check_finite(boundary: Boundary, name: str, values: _Half) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        index = tuple(int(place) for place in np.argwhere(~finite)[0])
        raise FormatValueError(f"{boundary}: {name} must be finite, got {values[index]} at {list(index)}")
