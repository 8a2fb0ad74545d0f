"""Owns plans: what will be prepared, launched and held, stated before a byte moves.  It must not touch a device.

The planner reads a `TrellisSource` and never asks which container it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource
from trellis_kernels import BLOCK_ROWS
from trellis_kernels.layers import DeviceLimits, MoeSmallKey, PrefillPlan, device_limits, op_backends
from trellis_moe.errors import MoeValueError
from trellis_moe.fused import Fused, choose_fused
from trellis_moe.scratch import ScratchBuffer, fused_scratch, op_by_op_scratch, total_bytes
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec, check_type
from trellis_prep import plan_layout

__all__ = ["ExecutionPlan", "WeightPlan", "plan_execution", "plan_weights"]

_FUSED_NAMES = {MoeSmallKey: "moe_small", PrefillPlan: "prefill"}
_FILL = 0.9  # a block this full on average is not too small: containers' block-row rule


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """A rank's share of a layer, before it is prepared.

    Args:
        source: the layer.
        extent: the share of the intermediate axis.
    """

    source: TrellisSource
    extent: TrellisExtent

    def required_nbytes(self) -> int:
        """Bytes of prepared codes and tables."""
        return plan_layout(self.source, self.extent).total_bytes


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """Everything about a launch but addresses.

    Args:
        weights: the share of the layer.
        activation: dtypes and the law between the GEMMs.
        routing: the reduction policy.
        capacity: the largest launch.
        device_type: `cpu` or `cuda`.
        block_rows: rows of a route block.
        backends: (op, backend) in launch order.
        scratch: buffers by name, dtype and size.
        fused: the kernels of a fused path, None where one op runs after the other.
    """

    weights: WeightPlan
    activation: ActivationSpec
    routing: RoutingSpec
    capacity: ExecutionCapacity
    device_type: str
    block_rows: int
    backends: tuple[tuple[str, str], ...]
    scratch: tuple[ScratchBuffer, ...]
    fused: Fused | None = None

    def required_nbytes(self) -> int:
        """Bytes of scratch that a caller owns, each buffer on its 16-byte boundary."""
        return total_bytes(self.scratch)

    def backend(self, op: str) -> str:
        """The backend of an op."""
        return dict(self.backends)[op]

    def explain(self) -> str:
        """What will run and why, in words."""
        source, extent = self.weights.source, self.weights.extent
        geometry, law = source.geometry, self.activation
        rates = ", ".join(str(rate) for rate in source.rates.distinct())
        lines = [
            f"{geometry.num_experts} experts, codebook {source.codebook}, K = {rates}",
            f"hidden {geometry.hidden_size} channels, stored {geometry.padded_hidden_size}",
            f"intermediate {geometry.intermediate_size} channels, stored {geometry.padded_intermediate_size}",
            f"share: channels {extent.first_channel}..{extent.end_channel} of {extent.global_intermediate_size}",
            f"up to {self.capacity.max_tokens} tokens x {self.capacity.top_k} routes, blocks of {self.block_rows} rows",
            f"activation {law.nonlinearity.kind}",
            f"dtypes: {law.io_dtype} in, {law.rotation_dtype} operands, float32 sums, {law.output_dtype} out",
            "reduction: each token's routes in slot order (deterministic)",
            "ops: " + ", ".join(f"{op} on {backend}" for op, backend in self.backends),
            f"prepared {self.weights.required_nbytes()} bytes, scratch {self.required_nbytes()} bytes: "
            + ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in self.scratch),
        ]
        return "\n".join(lines)


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
) -> ExecutionPlan:
    """Plan a launch.

    Args:
        weights: the share of the layer.
        activation: dtypes and law.
        capacity: the largest launch.
        routing: the reduction policy (default: deterministic).
        device: where it will run.
        limits: what kernels are chosen by (default: those of the device, where it is visible).

    Raises:
        MoeTypeError: if a declaration is of another type.
        MoeValueError: if the law's gate does not fit the experts, or the device is neither cpu nor cuda.
    """
    routing = RoutingSpec() if routing is None else routing
    _check_declarations(weights, activation, capacity, routing)
    device_type = _device_type(device)
    found = limits or device_limits(device) if device_type == "cuda" else None
    fused = choose_fused(weights, activation, routing, capacity, found) if found is not None else None
    if fused is not None:
        return ExecutionPlan(
            weights=weights,
            activation=activation,
            routing=routing,
            capacity=capacity,
            device_type=device_type,
            block_rows=fused.group_rows,
            backends=((_FUSED_NAMES[type(fused)], "cute"),),
            scratch=fused_scratch(fused, capacity),
            fused=fused,
        )
    return ExecutionPlan(
        weights=weights,
        activation=activation,
        routing=routing,
        capacity=capacity,
        device_type=device_type,
        block_rows=_block_rows(capacity, weights.source.geometry.num_experts),
        backends=op_backends(found),
        scratch=op_by_op_scratch(weights, capacity),
    )


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


def _device_type(device: torch.device | str) -> str:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise MoeValueError(f"device must be cpu or cuda, got {device!r}") from error
    if kind not in ("cpu", "cuda"):
        raise MoeValueError(f"device must be cpu or cuda, got {kind}")
    return kind


def _block_rows(capacity: ExecutionCapacity, num_experts: int) -> int:
    """The smallest block that an average expert does not fill beyond nine tenths, at most 64 rows."""
    candidates = [rows for rows in BLOCK_ROWS if rows <= 64]
    average = capacity.routes / num_experts
    return next((rows for rows in candidates if average < _FILL * rows), candidates[-1])
