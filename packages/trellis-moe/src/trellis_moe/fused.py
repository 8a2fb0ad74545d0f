"""Owns the choice between the fused paths of a GPU and op by op, with the reasons for it.  It must not launch.

The choice reads declarations and device limits alone, never weights or routing, so that a token's bits depend on the
plan and not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trellis_kernels import KernelError
from trellis_kernels.cute.moe_key import MOST_BYTE_CHANNELS
from trellis_kernels.layers import (
    DeviceLimits,
    MoeSmallKey,
    PrefillPlan,
    launch_scratch,
    plan_moe_small,
    plan_prefill,
)
from trellis_moe.scratch import BOUNDARY_BYTES
from trellis_moe.specs import ID_DTYPES, IO_DTYPES, ActivationSpec, ExecutionCapacity, RoutingSpec

if TYPE_CHECKING:
    from trellis_moe.plan import WeightPlan

__all__ = ["FUSED_NAMES", "Choice", "Declarations", "Fused", "choose_fused"]

Fused = MoeSmallKey | PrefillPlan
"""The kernels of a fused path: for few tokens, or for many."""
FUSED_NAMES: dict[type, str] = {MoeSmallKey: "moe_small", PrefillPlan: "prefill"}
"""Name of each fused path."""

_MOST_FEW_ROWS = 16.0  # routes of an average expert; beyond, the path of few tokens decodes a tile too often
_MOST_BYTE_ROWS = 4.0  # likewise; a product of bytes takes 4 rows, and more of them cost more than those of fp16
_MOST_TOP_K = 32  # routes of a token whose sum the path of few tokens writes out
_MOST_ORDERED = 8  # tokens of a launch that adds in slot order though another order is allowed
_BOUNDARY = 16  # bytes, on which the kernels need the first row of a launch
_MOST_GROUPS = 65535  # groups of one expert's routes that a launch of the path of few tokens covers


@dataclass(frozen=True, eq=False)
class Declarations:
    """All that a choice reads but the token count.

    Attributes:
        weights: the share of the layer.
        activation: dtypes, law and arithmetic.
        routing: dtypes of routes, and the reduction.
        capacity: routes of a token, and the bound of scratch.
        limits: what kernels are chosen by.
    """

    weights: WeightPlan
    activation: ActivationSpec
    routing: RoutingSpec
    capacity: ExecutionCapacity
    limits: DeviceLimits

    @property
    def experts(self) -> int:
        """Experts that routes are spread over: those of all ranks, so that a rank chooses as one with all of them."""
        return self.capacity.route_experts or self.weights.source.geometry.num_experts


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen for a launch, and what was not.

    Attributes:
        fused: the kernels, None where one op runs after the other.
        tokens: most tokens of a launch; fewer than asked for where scratch is bounded.
        rejected: (path, reason) of each path that comes before the chosen one.
    """

    fused: Fused | None
    tokens: int
    rejected: tuple[tuple[str, str], ...]


def choose_fused(declared: Declarations, tokens: int) -> Choice:
    """The fused kernels for a launch.

    Args:
        declared: the declarations.
        tokens: most tokens of the launch.
    """
    rejected: list[tuple[str, str]] = []
    source = declared.weights.source
    for name, choose in _PATHS:
        if declared.weights.extent.width == 0:
            reason = "the share has no channels"
        elif source.expert_transform is not None:
            reason = "it takes no intermediate Hadamard"
        elif declared.routing.apply_router_weight_on_input:
            reason = "it multiplies route weights into what experts give"
        else:
            found = choose(declared, tokens)
            if not isinstance(found, str):
                return Choice(found[0], found[1], tuple(rejected))
            reason = found
        rejected.append((name, reason))
    return Choice(None, tokens, tuple(rejected))


def _few_tokens(declared: Declarations, tokens: int) -> tuple[MoeSmallKey, int] | str:
    """Kernels and tokens of a launch, or why there are none."""
    top_k, experts = declared.capacity.top_k, declared.experts
    rows = tokens * top_k / experts
    if not declared.routing.deterministic_output and tokens > _MOST_ORDERED:
        return f"it adds routes in slot order, and launches of more than {_MOST_ORDERED} tokens may do otherwise"
    if top_k > _MOST_TOP_K:
        return f"{top_k} routes of a token, at most {_MOST_TOP_K}"
    if rows > _MOST_FEW_ROWS:
        return f"{rows:.1f} routes of an average expert, at most {_MOST_FEW_ROWS:.0f}"
    try:
        key = _few_key(declared, tokens, rows)
        fitting = _fitting_tokens(key, tokens, declared.capacity.scratch_bound)
        if fitting is None:
            needed = _few_bytes(key, 1)
            return f"one token needs {needed} bytes of scratch, the bound is {declared.capacity.scratch_bound}"
        if fitting < tokens:  # cut runs begin at whole groups of 8 tokens, so that every part of x is aligned
            fitting = fitting // 8 * 8 or fitting
            if any(fitting * nbytes % _BOUNDARY for nbytes in _row_bytes(declared)):
                return f"parts of {fitting} tokens, which the bound of scratch allows, begin off a boundary of 16 bytes"
            fewer = _few_key(declared, fitting, fitting * top_k / experts)
            key = fewer if _few_bytes(fewer, fitting) <= (declared.capacity.scratch_bound or 0) else key
    except (KernelError, ValueError) as error:
        return str(error)  # a layer outside what the kernels take runs otherwise
    if key.most_groups(fitting) > _MOST_GROUPS:
        return f"{key.most_groups(fitting)} groups of routes, at most {_MOST_GROUPS}"
    return key, fitting


def _row_bytes(declared: Declarations) -> tuple[int, int]:
    """Bytes of a row of x and of the output."""
    hidden, spec = declared.weights.source.geometry.hidden_size, declared.activation
    return hidden * IO_DTYPES[spec.io_dtype].itemsize, hidden * IO_DTYPES[spec.output_dtype].itemsize


def _few_key(declared: Declarations, tokens: int, rows: float) -> MoeSmallKey:
    activation, routing, limits = declared.activation, declared.routing, declared.limits
    widest = max(declared.weights.source.geometry.padded_hidden_size, declared.weights.extent.width)
    arithmetic = activation.arithmetic
    if arithmetic == "bytes" and (rows > _MOST_BYTE_ROWS or widest > MOST_BYTE_CHANNELS):
        arithmetic = "unrounded"
    return plan_moe_small(
        declared.weights.source,
        arch=limits.arch,
        max_tokens=tokens,
        top_k=declared.capacity.top_k,
        multiprocessors=limits.multiprocessors,
        extent=declared.weights.extent,
        activation=activation.nonlinearity,
        x_dtype=activation.io_dtype,
        out_dtype=activation.output_dtype,
        weight_dtype=routing.weight_dtype,
        id_bytes=ID_DTYPES[routing.id_dtype].itemsize,
        arithmetic=arithmetic,
        route_experts=declared.experts,
    )


def _few_bytes(key: MoeSmallKey, tokens: int) -> int:
    return sum(launch_scratch(key, tokens).values()) + BOUNDARY_BYTES


def _fitting_tokens(key: MoeSmallKey, tokens: int, bound: int | None) -> int | None:
    """Most tokens, up to those asked for, whose scratch a bound allows; None if it allows none."""
    if bound is None or _few_bytes(key, tokens) <= bound:
        return tokens
    if _few_bytes(key, 1) > bound:
        return None
    each = _few_bytes(key, 2) - _few_bytes(key, 1)  # parts grow by the same bytes with each token
    return 1 + (bound - _few_bytes(key, 1)) // each


def _many_tokens(declared: Declarations, tokens: int) -> tuple[PrefillPlan, int] | str:
    """Kernels and tokens of a launch, or why there are none."""
    activation, bound = declared.activation, declared.capacity.scratch_bound
    try:
        plan = plan_prefill(
            declared.weights.source,
            arch=declared.limits.arch,
            max_tokens=tokens,
            top_k=declared.capacity.top_k,
            extent=declared.weights.extent,
            activation=activation.nonlinearity,
            x_dtype=activation.io_dtype,
            out_dtype=activation.output_dtype,
            weight_dtype=declared.routing.weight_dtype,
            scratch_bound=None if bound is None else max(bound - BOUNDARY_BYTES, 1),
            reduction="ordered" if declared.routing.deterministic_output else "atomic",
            route_experts=declared.experts,
        )
    except (KernelError, ValueError) as error:
        return str(error)  # likewise
    return plan, tokens


_PATHS: tuple[tuple[str, Callable[[Declarations, int], tuple[Fused, int] | str]], ...] = (
    ("moe_small", _few_tokens),
    ("prefill", _many_tokens),
)
"""The fused paths, the preferred one first."""
