"""Owns the read of one linear's share into a host buffer.  It must not know slots or devices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.extent import TrellisExtent
from trellis_format.source import CodeLayout, Projection, TrellisSource, TrellisWeights
from trellis_prep.errors import PrepUnsupportedError

__all__ = ["check_layout", "read_linear"]


def check_layout(source: TrellisSource) -> None:
    """Accept codes that can be read here.

    Raises:
        PrepUnsupportedError: if they lie in another layout than `exl3-linear`.
    """
    if source.layout is not CodeLayout.EXL3_LINEAR:
        raise PrepUnsupportedError(f"codes in {source.layout} layout cannot be prepared; supported: exl3-linear")


def read_linear(
    source: TrellisSource,
    weights: TrellisWeights,
    expert: int,
    projection: int,
    extent: TrellisExtent,
    out: npt.NDArray[np.uint8],
) -> None:
    """Read the share of one linear, in the final tile order.

    Args:
        source: the layer.
        weights: its arrays.
        expert: index.
        projection: index into the geometry's projections.
        extent: the share, inside the source's extent.
        out: `[bytes] uint8`, exactly the share's bytes.

    Raises:
        PrepUnsupportedError: if the codes' layout cannot be read here.
        FormatValueError: if the file is short or changed; names file and tensor.
    """
    check_layout(source)
    view = weights.code_view(expert, projection)
    first, end = (channel - source.extent.first_channel for channel in (extent.first_channel, extent.end_channel))
    share, whole = slice(first // 16, end // 16), [slice(0, size) for size in view.shape]
    axis = 0 if source.geometry.projections[projection] is Projection.DOWN else 1
    whole[axis] = share
    view.read_box(tuple(whole), out)
