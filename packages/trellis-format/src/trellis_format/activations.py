"""Owns the laws that join gate and up between the two GEMMs of an expert.  It must not know precision or devices.

silu       sigmoid(g) * g * u
gelu_tanh  gelu(g) * u, tanh form
situ       4 tanh(g / 4) * sigmoid(g) * 25 tanh(u / 25)
swigluoai  g' sigmoid(alpha g') * (u' + beta), g' = min(g, limit), u' = clamp(u, -limit, limit)
relu2      relu(u)^2, no gate
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError

__all__ = ["ACTIVATIONS", "Activation"]

ACTIVATIONS = ("silu", "gelu_tanh", "situ", "swigluoai", "relu2")
"""Every activation by name."""
SITU_GATE_LIMIT = 4.0
"""Soft bound on the gate of situ."""
SITU_UP_LIMIT = 25.0
"""Soft bound on the up branch of situ."""
_CONSTANTS = {"swigluoai": {"limit": 7.0, "alpha": 1.702, "beta": 1.0}}
"""What the architecture that brought a law gives its constants; gpt-oss brought swigluoai."""

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Activation:
    """A named activation and its constants.

    Args:
        kind: one of `ACTIVATIONS`.
        limit: clamp of swigluoai, and for silu an optional clamp of the same form; infinity is none.
        alpha: slope inside the sigmoid of swigluoai.
        beta: addend of the up branch of swigluoai.

    Raises:
        FormatTypeError: if a constant is not a number.
        FormatValueError: if the kind is unknown or a constant is NaN, or the limit not positive.
    """

    kind: str
    limit: float = math.inf
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATIONS:
            raise FormatValueError(f"unknown activation {self.kind!r}; known: {', '.join(ACTIVATIONS)}")
        for name in ("limit", "alpha", "beta"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise FormatTypeError(f"activation {name} must be a number, got {type(number).__name__}")
            if math.isnan(number):
                raise FormatValueError(f"activation {name} is NaN")
            if name != "limit" and math.isinf(number):
                raise FormatValueError(f"activation {name} is infinite")
        if self.limit <= 0:
            raise FormatValueError(f"activation limit {self.limit} must be above 0")

    @classmethod
    def named(cls, kind: str) -> Activation:
        """The law of that name as its architecture defines it: swigluoai has limit 7, alpha 1.702 and beta 1.

        Args:
            kind: one of `ACTIVATIONS`.

        Raises:
            FormatValueError: if the kind is unknown.
        """
        return cls(kind, **_CONSTANTS.get(kind, {}))

    def __repr__(self) -> str:  # inf has no literal, so a generated repr would not evaluate back
        limit = "float('inf')" if math.isinf(self.limit) else repr(self.limit)
        return f"Activation(kind={self.kind!r}, limit={limit}, alpha={self.alpha!r}, beta={self.beta!r})"

    @property
    def gated(self) -> bool:
        """Whether the law takes a gate as well as an up branch."""
        return self.kind != "relu2"

    def apply(self, gate: _Array | None, up: _Array) -> _Array:
        """Join the branches in float64.

        Args:
            gate: `[rows, intermediate] float64`, None for a law without a gate.
            up: `[rows, intermediate] float64`.

        Returns:
            `[rows, intermediate] float64`.

        Raises:
            FormatValueError: if a gate is missing or not wanted.
        """
        if (gate is not None) != self.gated:
            raise FormatValueError(f"activation {self.kind} takes {'a' if self.gated else 'no'} gate")
        if gate is None:
            return np.square(np.maximum(up, 0.0))
        if self.kind == "situ":
            return (
                SITU_GATE_LIMIT * np.tanh(gate / SITU_GATE_LIMIT) * _sigmoid(gate)
                * (SITU_UP_LIMIT * np.tanh(up / SITU_UP_LIMIT))
            )  # fmt: skip
        gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        if self.kind == "gelu_tanh":
            inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
            return 0.5 * gate * (1.0 + np.tanh(inner)) * up
        if self.kind == "swigluoai":
            return gate * _sigmoid(self.alpha * gate) * (up + self.beta)
        return gate * _sigmoid(gate) * up


def _sigmoid(values: _Array) -> _Array:
    return 0.5 * (1.0 + np.tanh(0.5 * values))  # no overflow for any finite argument
