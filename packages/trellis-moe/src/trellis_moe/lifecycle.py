"""Owns the step from a weight plan to prepared weights.  It must not know launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_format.source import TrellisWeights
from trellis_moe.plan import WeightPlan
from trellis_prep import PreparedExperts, StagingBuffer, TrellisStaging, prepare

__all__ = ["prepare_weights"]


def prepare_weights(
    plan: WeightPlan,
    weights: TrellisWeights,
    *,
    device: torch.device | str | None = None,
    staging: TrellisStaging | None = None,
    progress: Callable[[int, int], None] | None = None,
    buffer: StagingBuffer | None = None,
) -> PreparedExperts:
    """Stream the planned share of a layer to a device.

    Args:
        plan: from `plan_weights`.
        weights: the arrays that the plan's source describes.
        device: `cpu` (default) or a CUDA device.
        staging: bounds on host slots.
        progress: called with (bytes done, bytes in all).
        buffer: host memory that is kept from layer to layer; None takes its own for this one.

    Raises:
        PrepValueError: if the device cannot be used or the staging bound is too small.
        FormatValueError: if a file is short or changed while it is read.
    """
    return prepare(
        plan.source, weights, device=device, staging=staging, extent=plan.extent, progress=progress, buffer=buffer
    )
