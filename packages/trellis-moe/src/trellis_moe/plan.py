"""Owns plans: what will be prepared, launched and held, stated before a byte moves.  It must not touch a device.

The planner reads a `TrellisSource` and never asks which container it came from.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import DeviceLimits, device_limits
from trellis_moe.environment import reference_asked
from trellis_moe.errors import MoeValueError
from trellis_moe.explain import explain
from trellis_moe.keys import plan_keys
from trellis_moe.scratch import ScratchSpec, place
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, MoeGeometry, RoutingSpec, check_type
from trellis_moe.support import check_support
from trellis_moe.variants import Variant, plan_variants
from trellis_prep import plan_layout

__all__ = ["ExecutionPlan", "WeightPlan", "plan_execution", "plan_weights"]

_WITHOUT_KERNELS = {
    "cpu": "the device is a CPU",
    "cuda": "no CUDA device is visible, or no compile target covers it",
}
"""Why a device of each type may have no kernels."""


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """A rank's share of a layer, before it is prepared.

    Args:
        source: the layer.
        extent: the share of the intermediate axis.
    """

    source: TrellisSource
    extent: TrellisExtent

    @property
    def geometry(self) -> MoeGeometry:
        """The share's sizes.

        Raises:
            MoeValueError: if the share is empty.
        """
        whole = self.source.geometry
        return MoeGeometry(
            num_experts=whole.num_experts, hidden_size=whole.hidden_size, intermediate_size=self.extent.width
        )

    def required_nbytes(self) -> int:
        """Bytes of prepared codes and tables."""
        return plan_layout(self.source, self.extent).total_bytes


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """Everything about the runs of a layer but addresses.

    Args:
        weights: the share of the layer.
        activation: dtypes, law and arithmetic.
        routing: dtypes of routes, and the reduction.
        capacity: the largest run, and the token counts with launches of their own.
        device_type: `cpu` or `cuda`.
        limits: what kernels were chosen by; None where there are none.
        reference: whether every op runs on the torch backend, whatever the device.
        variants: the launches, by ascending token count.
    """

    weights: WeightPlan
    activation: ActivationSpec
    routing: RoutingSpec
    capacity: ExecutionCapacity
    device_type: str
    limits: DeviceLimits | None
    reference: bool
    variants: tuple[Variant, ...]

    @property
    def direct_token_capacity(self) -> int:
        """Most tokens that one launch takes; a run of more is cut into launches of so many."""
        return min(self.capacity.max_tokens, self.variants[-1].tokens)

    @property
    def reduction(self) -> str:
        """How the largest launch adds a token's routes, `ordered` or `atomic`."""
        return self.variants[-1].reduction

    def variant_for(self, tokens: int) -> Variant:
        """The launch for a token count: the smallest that covers it, the largest for a run that is cut.

        Raises:
            MoeValueError: if there are more tokens than planned.
        """
        if tokens > self.capacity.max_tokens:
            raise MoeValueError(f"{tokens} tokens exceed the plan's {self.capacity.max_tokens}")
        return next((variant for variant in self.variants if variant.tokens >= tokens), self.variants[-1])

    def cut(self, tokens: int) -> tuple[tuple[int, int, Variant], ...]:
        """The launches of a run: first token, tokens, and which launch; at most the last is not the largest.

        Raises:
            MoeValueError: if there are more tokens than planned.
        """
        if tokens > self.capacity.max_tokens:
            raise MoeValueError(f"{tokens} tokens exceed the plan's {self.capacity.max_tokens}")
        step = self.direct_token_capacity
        counts = ((first, min(step, tokens - first)) for first in range(0, tokens, step))
        return tuple((first, count, self.variant_for(count)) for first, count in counts)

    def required_nbytes(self) -> int:
        """Bytes of the scratch arena that a caller owns: those of the launch that needs most."""
        return max(variant.scratch_nbytes for variant in self.variants)

    def scratch_specs(self) -> tuple[ScratchSpec, ...]:
        """Every buffer of every launch with its place in the arena; launches overlay each other."""
        return tuple(spec for variant in self.variants for spec in place(variant.tokens, variant.scratch))

    def compile_keys(self) -> tuple[KernelKey, ...]:
        """Every kernel that a run may launch, each once."""
        return plan_keys(self)

    def explain(self) -> str:
        """What will run and why, in words."""
        return explain(self)

    def to_json(self) -> str:
        """The plan as a JSON document, with what it declares and what it states; see `trellis_moe.plan_json`."""
        text: str = _plan_json().plan_document(self).text()
        return text

    @classmethod
    def from_json(cls, text: str) -> ExecutionPlan:
        """The plan of a JSON document, planned again from its declarations.

        Raises:
            MoeValueError: as `trellis_moe.plan_json.parse_plan`.
        """
        plan: ExecutionPlan = _plan_json().parse_plan(text)
        return plan


def plan_weights(source: TrellisSource, extent: TrellisExtent | None = None) -> WeightPlan:
    """Plan a rank's share of a layer.

    Args:
        source: the layer.
        extent: the share of the intermediate axis (default: all that the source covers).

    Raises:
        MoeTypeError: if `source` is not a `TrellisSource` or `extent` not a `TrellisExtent`.
        PrepValueError, FormatValueError: if the extent does not fit the source or cuts a Hadamard block.
    """
    check_type("source", source, TrellisSource)
    share = source.extent if extent is None else extent
    check_type("extent", share, TrellisExtent)
    plan_layout(source, share)
    return WeightPlan(source=source, extent=share)


def plan_execution(
    weights: WeightPlan,
    *,
    activation: ActivationSpec,
    capacity: ExecutionCapacity,
    routing: RoutingSpec | None = None,
    device: torch.device | str = "cpu",
    limits: DeviceLimits | None = None,
    reference: bool | None = None,
) -> ExecutionPlan:
    """Plan the runs of a layer.

    Args:
        weights: the share of the layer.
        activation: dtypes, law and arithmetic.
        capacity: the largest run, and the token counts with launches of their own.
        routing: dtypes of routes, and the reduction (default: deterministic).
        device: where it will run.
        limits: what kernels are chosen by (default: those of the device, where it is visible).
        reference: whether every op runs on the torch backend, exact and slow, also on a GPU; None takes the
            environment's `TRELLIS_REFERENCE`.

    Raises:
        MoeTypeError: if a declaration is of another type.
        MoeUnsupportedError: if no path takes the layer, or the arithmetic on its codebook; shows the codebook's row
            of the support table.
        MoeValueError: if the law's gate does not fit the experts, the device is neither cpu nor cuda, one token does
            not fit the bound of scratch, or no launch can add in the order of arrival though that is asked for.
    """
    routing = RoutingSpec() if routing is None else routing
    _check_declarations(weights, activation, capacity, routing)
    check_support(weights.source, activation)
    device_type = _device_type(device)
    asked = reference_asked() if reference is None else reference
    found = limits or device_limits(device) if device_type == "cuda" else None
    why = "" if found else _WITHOUT_KERNELS[device_type]
    why = "the reference backend is asked for" if asked else why
    variants = plan_variants(weights, activation, routing, capacity, found, why)
    if not routing.deterministic_output:
        _check_atomic(variants[-1])
    return ExecutionPlan(
        weights=weights,
        activation=activation,
        routing=routing,
        capacity=capacity,
        device_type=device_type,
        limits=found,
        reference=asked,
        variants=variants,
    )


def _plan_json() -> Any:
    """The module of plans as JSON, which builds on this one."""
    return importlib.import_module("trellis_moe.plan_json")


def _check_declarations(
    weights: WeightPlan, activation: ActivationSpec, capacity: ExecutionCapacity, routing: RoutingSpec
) -> None:
    for name, value, kind in (
        ("weights", weights, WeightPlan), ("activation", activation, ActivationSpec),
        ("capacity", capacity, ExecutionCapacity), ("routing", routing, RoutingSpec),
    ):  # fmt: skip
        check_type(name, value, kind)
    geometry = weights.source.geometry
    if activation.nonlinearity.gated != geometry.gated:
        having = "have a gate" if geometry.gated else "have no gate"
        raise MoeValueError(
            f"activation {activation.nonlinearity.kind} takes {'a' if activation.nonlinearity.gated else 'no'} gate, "
            f"the experts {having}"
        )


def _check_atomic(largest: Variant) -> None:
    if largest.reduction == "atomic":
        return
    failed = [f"the launch of up to {largest.tokens} tokens takes {largest.path}, which adds in slot order"]
    failed += [f"{path}: {reason}" for path, reason in largest.rejected]
    raise MoeValueError(
        f"deterministic_output=False: no launch can add routes in the order of arrival: {'; '.join(failed)}"
    )


def _device_type(device: torch.device | str) -> str:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise MoeValueError(f"device must be cpu or cuda, got {device!r}") from error
    if kind not in ("cpu", "cuda"):
        raise MoeValueError(f"device must be cpu or cuda, got {kind}")
    return kind
