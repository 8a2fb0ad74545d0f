"""Owns a rank's scales, signs, biases and descriptors: which rows and channels of the layer's arrays they are.

It must not know codes, staging or devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.signs import SignAxis, expert_signs
from trellis_format.source import Projection, TrellisWeights
from trellis_prep.layout import PreparedLayout, holds_down_bias

__all__ = ["table_rows"]


def table_rows(weights: TrellisWeights, layout: PreparedLayout) -> dict[str, npt.NDArray[Any]]:
    """The rank's part of each table, as rows.

    Args:
        weights: the layer's arrays.
        layout: the share.

    Returns:
        `[rows, channels]` by the names of `layout.tables`: views of the weights' arrays where those are contiguous,
        in the row order of the prepared table.
    """
    origin = layout.source.extent.first_channel
    local = slice(layout.extent.first_channel - origin, layout.extent.end_channel - origin)
    arrays: dict[str, npt.NDArray[Any]] = {
        "descriptors": np.stack((layout.offsets, layout.half_bits), axis=-1),
        "input_scales": weights.input_scales,
        "intermediate_scales": weights.intermediate_scales,
        "output_scales": weights.output_scales,
    }
    rows = {name: _as_rows(array) for name, array in arrays.items()}
    rows["intermediate_scales"] = rows["intermediate_scales"][:, local]
    if weights.expert_sign_patterns is not None:  # drawn for the whole axis, then cut: a draw of local length differs
        for axis in SignAxis:
            signs = expert_signs(weights.expert_sign_patterns, axis, layout.extent)
            rows[f"signs.{axis.name.lower()}"] = signs.astype(np.float16)
    for projection, bias in weights.biases.items():
        if projection is not Projection.DOWN:
            rows[f"bias.{projection}"] = bias[:, local]
        elif holds_down_bias(layout.extent):
            rows[f"bias.{projection}"] = bias
    return rows


def _as_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.reshape(-1, array.shape[-1])
