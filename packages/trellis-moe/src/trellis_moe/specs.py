"""Owns what a caller declares before anything is planned: geometry, activation, routing, capacity.

It must not know weights.  All are frozen, and their reprs evaluate back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from trellis_format.activations import Activation
from trellis_moe.errors import MoeTypeError, MoeValueError

__all__ = [
    "ARITHMETICS",
    "ID_DTYPES",
    "IO_DTYPES",
    "ActivationSpec",
    "ExecutionCapacity",
    "MoeGeometry",
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
ARITHMETICS = ("exact", "unrounded", "bytes")
"""What the products may be made of where a launch of few tokens gains by it; others are of exact code values.

    exact      code values
    unrounded  mul1, mcg and 3inst: fp16 values before the last rounding of the codebook's law
    bytes      mul1: the bytes of its hash, likewise before that rounding, with activations in 16 bits and one scale for
               a row; unrounded where more routes share an expert

All stay inside the bound that every layer is held to, 1e-3 relative L2 of float64 on the exact codes (4e-3 with
bfloat16 inputs).
"""
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


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MoeTypeError(f"{name} must be an int, got {type(value).__name__}")
    if value <= 0:
        raise MoeValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class MoeGeometry:
    """The sizes that launches are planned from: those of a rank's share, never of the whole layer.

    Args:
        num_experts: experts that the rank holds.
        hidden_size: channels of x and of the result.
        intermediate_size: intermediate channels of the rank's share, as stored.

    Raises:
        MoeTypeError: if a size is not an int.
        MoeValueError: if it is not positive.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_positive(field.name, getattr(self, field.name))


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """The activations that go in and out, and the law between the GEMMs.

    Args:
        nonlinearity: the law.
        io_dtype: dtype of x, a key of `IO_DTYPES`.
        output_dtype: dtype of y, a key of `IO_DTYPES`.
        rotation_dtype: dtype in which rotated activations meet the weights; float16.
        arithmetic: one of `ARITHMETICS`; what a launch may use, and a plan says which one uses it.

    Raises:
        MoeTypeError: if the law is not an `Activation`.
        MoeValueError: if a dtype or the arithmetic is unknown, or a constant of the law is beyond float32, in which it
            is computed.
    """

    nonlinearity: Activation
    io_dtype: str
    output_dtype: str = "float32"
    rotation_dtype: str = "float16"
    arithmetic: str = "exact"

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
        if self.arithmetic not in ARITHMETICS:
            raise MoeValueError(f"arithmetic {self.arithmetic!r} is not one of {', '.join(ARITHMETICS)}")


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """How routes become tokens again.

    Args:
        deterministic_output: whether the same inputs must give the same bits, by adding each token's routes in slot
            order.  False lets a launch add them in the order of arrival, where that path can.
        apply_router_weight_on_input: whether a route's weight multiplies what its expert takes, in place of what it
            gives; paths that run one op after the other have it.
        id_dtype: of the route ids, `int32` or `int64`; kernels are compiled for it, the torch backend takes either.
        weight_dtype: of the route weights, a key of `IO_DTYPES`; likewise.

    Raises:
        MoeTypeError: if a policy is not a bool.
        MoeValueError: if a dtype is unknown.
    """

    deterministic_output: bool = True
    apply_router_weight_on_input: bool = False
    id_dtype: str = "int64"
    weight_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("deterministic_output", "apply_router_weight_on_input"):
            check_type(name, getattr(self, name), bool)
        if self.id_dtype not in ID_DTYPES:
            raise MoeValueError(f"id_dtype {self.id_dtype!r} is not one of the names {', '.join(ID_DTYPES)}")
        if self.weight_dtype not in IO_DTYPES:
            raise MoeValueError(f"weight_dtype {self.weight_dtype!r} is not one of the names {', '.join(IO_DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class ExecutionCapacity:
    """The most that one run takes, and the token counts that get launches of their own.

    Args:
        max_tokens: tokens of a run.
        top_k: routes of each token.
        token_counts: token counts with kernels chosen for just them, each in 1..max_tokens, kept ascending without
            repeats.  A run of another count takes the next larger one, and there is always one for max_tokens.  Counts
            may differ in the last bits of a token; without any, a token's bits do not depend on the tokens beside it.
        scratch_bound: most bytes of scratch; runs that would need more are cut into several launches.  None is no
            bound.
        route_experts: experts that route ids name, where that is more than the rank holds.  Launches are then chosen as
            by a rank that holds them all, and a binding needs an expert map of that length.  None leaves the map to
            the binding.

    Raises:
        MoeTypeError: if a number is not an int.
        MoeValueError: if it is not positive, a count is above max_tokens, or routes leave 31 bits.
    """

    max_tokens: int
    top_k: int
    token_counts: tuple[int, ...] = ()
    scratch_bound: int | None = None
    route_experts: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "scratch_bound", "route_experts"):
            value = getattr(self, name)
            if value is not None or name in ("max_tokens", "top_k"):
                _check_positive(name, value)
        if self.routes >= 1 << 31:
            raise MoeValueError(f"{self.max_tokens} tokens x {self.top_k} routes exceed 2^31 - 1 routes")
        check_type("token_counts", self.token_counts, Iterable)
        for count in self.token_counts:
            _check_positive("a token count", count)
            if count > self.max_tokens:
                raise MoeValueError(f"token count {count} is above max_tokens {self.max_tokens}")
        object.__setattr__(self, "token_counts", tuple(sorted(set(self.token_counts))))

    @property
    def routes(self) -> int:
        """Routes of the largest run."""
        return self.max_tokens * self.top_k

    @property
    def launch_tokens(self) -> tuple[int, ...]:
        """Token counts that get launches of their own, ascending; the last is max_tokens."""
        return tuple(sorted({*self.token_counts, self.max_tokens}))
