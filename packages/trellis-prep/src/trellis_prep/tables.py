"""Owns a rank's scales, biases and descriptors: which rows and channels of the layer's arrays they are.

It must not know codes or staging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.source import Projection, TrellisWeights
from trellis_prep.layout import PreparedLayout

__all__ = ["PreparedTables", "move_tables"]


@dataclass(frozen=True, eq=False)
class PreparedTables:
    """The tables of `PreparedExperts`, by the same names."""

    descriptors: torch.Tensor
    input_scales: torch.Tensor
    intermediate_scales: torch.Tensor
    output_scales: torch.Tensor
    biases: dict[Projection, torch.Tensor]


def move_tables(weights: TrellisWeights, layout: PreparedLayout, device: torch.device) -> PreparedTables:
    """Copy a rank's tables to its device.

    Args:
        weights: the layer's arrays.
        layout: the share.
        device: destination.
    """
    source = layout.source
    first = layout.extent.first_channel - source.extent.first_channel
    local = slice(first, first + layout.extent.width)
    biases: dict[Projection, torch.Tensor] = {}
    for projection, bias in weights.biases.items():
        if projection is not Projection.DOWN:
            biases[projection] = _to_device(bias[:, local], device)
        elif layout.holds_down_bias:
            biases[projection] = _to_device(bias, device)
    return PreparedTables(
        descriptors=_to_device(np.stack((layout.offsets, layout.half_bits), axis=-1), device),
        input_scales=_to_device(_with_experts(weights.input_scales, source.shared_input_scales), device),
        intermediate_scales=_to_device(weights.intermediate_scales[:, :, local], device),
        output_scales=_to_device(_with_experts(weights.output_scales, source.shared_output_scales), device),
        biases=biases,
    )


def _with_experts(scales: npt.NDArray[np.float16], shared: bool) -> npt.NDArray[np.float16]:
    return scales[None] if shared else scales


def _to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(array, order="C")).to(device)  # a copy: prepared tables own their storage
