"""Owns the torch activations, in float32.  It must not know rotations.

The laws are those of `trellis_format.activations`, joined by name.
"""

from __future__ import annotations

import math

import torch

from trellis_format.activations import SITU_GATE_LIMIT, SITU_UP_LIMIT, Activation
from trellis_kernels.arguments import check_activate

__all__ = ["activate"]


def activate(gate: torch.Tensor | None, up: torch.Tensor, *, activation: Activation, out: torch.Tensor) -> torch.Tensor:
    """Join gate and up; see `trellis_kernels.ops.activate`."""
    check_activate(gate, up, activation, out)
    return out.copy_(torch.relu(up).square() if gate is None else _gated(gate, up, activation))


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.kind == "situ":
        soft_gate = SITU_GATE_LIMIT * torch.tanh(gate / SITU_GATE_LIMIT)
        return soft_gate * torch.sigmoid(gate) * (SITU_UP_LIMIT * torch.tanh(up / SITU_UP_LIMIT))
    if not math.isinf(activation.limit):
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation.kind == "swigluoai":
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
    return gate * torch.sigmoid(gate) * up
