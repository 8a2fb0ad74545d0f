"""Owns the launches of a plan: for each planned token count the path, its kernels and its scratch.

It must not know addresses.  A run takes one launch, or is cut into several of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trellis_kernels import BLOCK_ROWS
from trellis_kernels.layers import DeviceLimits, op_backends
from trellis_moe.errors import MoeValueError
from trellis_moe.fused import FUSED_NAMES, Choice, Declarations, Fused, choose_fused
from trellis_moe.scratch import ScratchBuffer, fused_scratch, op_by_op_scratch, total_bytes
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec

if TYPE_CHECKING:
    from trellis_moe.plan import WeightPlan

__all__ = ["OP_BY_OP", "Variant", "plan_variants"]

OP_BY_OP = "op_by_op"
"""Name of the path that runs one op after the other."""
_FILL = 0.9  # a block this full on average is not too small: containers' block-row rule


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One launch of a plan.

    Args:
        tokens: most tokens that it takes.
        path: `moe_small` or `prefill`, the fused ones, or `op_by_op`.
        block_rows: rows of a route block.
        backends: (op, backend) in launch order.
        scratch: buffers by name, dtype and size.
        fused: the kernels of a fused path.
        rejected: (path, reason) of each path that would come before this one.
    """

    tokens: int
    path: str
    block_rows: int
    backends: tuple[tuple[str, str], ...]
    scratch: tuple[ScratchBuffer, ...]
    fused: Fused | None = None
    rejected: tuple[tuple[str, str], ...] = ()

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of an arena that serves this launch."""
        return total_bytes(self.scratch)

    @property
    def arithmetic(self) -> str:
        """What its products are made of, one of `trellis_moe.specs.ARITHMETICS`."""
        return getattr(self.fused, "arithmetic", "exact")

    @property
    def reduction(self) -> str:
        """How it adds a token's routes, `ordered` by slot or `atomic`, in the order of arrival."""
        return getattr(self.fused, "reduction", "ordered")

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold it: whether every op is a kernel."""
        return all(backend == "cute" for _, backend in self.backends)

    def backend(self, op: str) -> str:
        """The backend of an op."""
        return dict(self.backends)[op]


def plan_variants(
    weights: WeightPlan,
    activation: ActivationSpec,
    routing: RoutingSpec,
    capacity: ExecutionCapacity,
    limits: DeviceLimits | None,
    why_not_fused: str = "",
) -> tuple[Variant, ...]:
    """The launches for every planned token count, ascending.

    Args:
        weights: the share of the layer.
        activation: dtypes, law and arithmetic.
        routing: dtypes of routes, and the reduction.
        capacity: token counts, and the bound of scratch; a count whose launch would exceed it gets a smaller one.
        limits: what kernels are chosen by; None is a device without kernels.
        why_not_fused: why the fused paths are out of question, if they are.

    Raises:
        MoeValueError: if not even one token fits the bound of scratch.
    """
    found: dict[int, Variant] = {}
    for tokens in capacity.launch_tokens:
        choice = Choice(None, tokens, (("moe_small", why_not_fused), ("prefill", why_not_fused)))
        if limits is not None and not why_not_fused:
            choice = choose_fused(Declarations(weights, activation, routing, capacity, limits), tokens)
        backends = op_backends(None if why_not_fused else limits, weights.source.geometry.num_experts)
        variant = _variant(weights, capacity, choice, backends)
        found.setdefault(variant.tokens, variant)
    return tuple(found[tokens] for tokens in sorted(found))


def _variant(
    weights: WeightPlan, capacity: ExecutionCapacity, choice: Choice, backends: tuple[tuple[str, str], ...]
) -> Variant:
    fused = choice.fused
    if fused is not None:
        name = FUSED_NAMES[type(fused)]
        return Variant(
            tokens=choice.tokens,
            path=name,
            block_rows=fused.group_rows,
            backends=((name, "cute"),),
            scratch=fused_scratch(fused, choice.tokens),
            fused=fused,
            rejected=choice.rejected,
        )
    tokens = _op_by_op_tokens(weights, capacity, choice.tokens)
    return Variant(
        tokens=tokens,
        path=OP_BY_OP,
        block_rows=_block_rows(tokens * capacity.top_k, capacity.route_experts or weights.source.geometry.num_experts),
        backends=backends,
        scratch=op_by_op_scratch(weights, tokens, capacity.top_k),
        rejected=choice.rejected,
    )


def _op_by_op_tokens(weights: WeightPlan, capacity: ExecutionCapacity, tokens: int) -> int:
    """Most tokens, up to those asked for, whose buffers the bound allows."""
    bound = capacity.scratch_bound
    if bound is None or total_bytes(op_by_op_scratch(weights, tokens, capacity.top_k)) <= bound:
        return tokens
    low, high = 0, tokens
    while high - low > 1:
        middle = (low + high) // 2
        fits = total_bytes(op_by_op_scratch(weights, middle, capacity.top_k)) <= bound
        low, high = (middle, high) if fits else (low, middle)
    if not low:
        needed = total_bytes(op_by_op_scratch(weights, 1, capacity.top_k))
        raise MoeValueError(
            f"a scratch bound of {bound} bytes is below the {needed} that one token of {capacity.top_k} routes needs"
        )
    return low


def _block_rows(routes: int, num_experts: int) -> int:
    """The smallest block that an average expert does not fill beyond nine tenths, at most 64 rows."""
    candidates = [rows for rows in BLOCK_ROWS if rows <= 64]
    average = routes / num_experts
    return next((rows for rows in candidates if average < _FILL * rows), candidates[-1])
