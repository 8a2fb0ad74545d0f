"""Owns what a caller declares before anything is planned: activation, routing, capacity.  It must not know weights.

All are frozen, and their reprs evaluate back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from trellis_format.activations import Activation
from trellis_moe.errors import MoeTypeError, MoeValueError

__all__ = [
    "ID_DTYPES",
    "IO_DTYPES",
    "ActivationSpec",
    "ExecutionCapacity",
    "RoutingSpec",
    "check_type",
    "io_dtype_name",
]

IO_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Activation dtypes by name."""
ID_DTYPES: dict[str, torch.dtype] = {"int32": torch.int32, "int64": torch.int64}
"""Route id dtypes by name."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


def check_type(name: str, value: object, kind: type) -> None:
    """Accept a value of a type.

    Raises:
        MoeTypeError: if it is of another; names both.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise MoeTypeError(f"{name} must be {article} {kind.__name__}, got {type(value).__name__}")


def io_dtype_name(dtype: torch.dtype) -> str:
    """The name of an activation dtype.

    Raises:
        MoeTypeError: if activations cannot have it.
    """
    for name, known in IO_DTYPES.items():
        if known is dtype:
            return name
    raise MoeTypeError(f"activations must be one of {', '.join(IO_DTYPES)}, got {dtype}")


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """The activations that go in and out, and the law between the GEMMs.

    Args:
        nonlinearity: the law.
        io_dtype: dtype of x, a key of `IO_DTYPES`.
        output_dtype: dtype of y, a key of `IO_DTYPES`.
        rotation_dtype: dtype in which rotated activations meet the weights; float16.

    Raises:
        MoeTypeError: if the law is not an `Activation`.
        MoeValueError: if a dtype is unknown, or a constant of the law is beyond float32, in which it is computed.
    """

    nonlinearity: Activation
    io_dtype: str
    output_dtype: str = "float32"
    rotation_dtype: str = "float16"

    def __post_init__(self) -> None:
        check_type("nonlinearity", self.nonlinearity, Activation)
        for name in ("limit", "alpha", "beta"):
            value = getattr(self.nonlinearity, name)
            if math.isfinite(value) and abs(value) > _FLOAT32_MAX:
                raise MoeValueError(f"activation {name} {value} is beyond float32, the largest is {_FLOAT32_MAX}")
        for name in ("io_dtype", "output_dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in IO_DTYPES:
                raise MoeValueError(f"{name} {value!r} is not one of the names {', '.join(IO_DTYPES)}")
        if self.rotation_dtype != "float16":
            raise MoeValueError(f"rotation_dtype {self.rotation_dtype!r} is not float16")


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """How routes become tokens again.

    Args:
        deterministic_output: whether the same inputs give the same bits; the only policy so far.
        id_dtype: of the route ids, `int32` or `int64`; kernels are compiled for it, the torch backend takes either.
        weight_dtype: of the route weights, a key of `IO_DTYPES`; likewise.

    Raises:
        MoeValueError: if a policy is asked for that no path has, or a dtype is unknown.
    """

    deterministic_output: bool = True
    id_dtype: str = "int64"
    weight_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.deterministic_output is not True:
            raise MoeValueError("only deterministic_output=True is available: routes are summed in slot order")
        if self.id_dtype not in ID_DTYPES:
            raise MoeValueError(f"id_dtype {self.id_dtype!r} is not one of the names {', '.join(ID_DTYPES)}")
        if self.weight_dtype not in IO_DTYPES:
            raise MoeValueError(f"weight_dtype {self.weight_dtype!r} is not one of the names {', '.join(IO_DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class ExecutionCapacity:
    """The most that one launch takes.

    Args:
        max_tokens: tokens.
        top_k: routes of each token.
        scratch_bound: most bytes of scratch that the many-token path may take, by cutting a launch; None is no bound.

    Raises:
        MoeTypeError: if a number is not an int.
        MoeValueError: if it is not positive, or routes leave 31 bits.
    """

    max_tokens: int
    top_k: int
    scratch_bound: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "scratch_bound" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise MoeTypeError(f"{field.name} must be an int, got {type(value).__name__}")
            if value <= 0:
                raise MoeValueError(f"{field.name} must be positive, got {value}")
        if self.routes >= 1 << 31:
            raise MoeValueError(f"{self.max_tokens} tokens x {self.top_k} routes exceed 2^31 - 1 routes")

    @property
    def routes(self) -> int:
        """Routes of the largest launch."""
        return self.max_tokens * self.top_k
