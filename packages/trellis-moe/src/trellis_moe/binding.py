"""Owns the binding of a plan to prepared weights and scratch, and its launch.  It must not know containers or plans' making.

A binding's addresses are fixed.  The torch backend allocates temporaries of its own while it runs; kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from trellis_prep import PreparedExperts

from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.paths.op_by_op import OpByOp
from trellis_moe.plan import ExecutionPlan
from trellis_moe.scratch import carve
from trellis_moe.specs import IO_DTYPES

__all__ = ["Binding", "bind"]

_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Binding:
    """A plan, prepared weights and scratch, ready to run; made by `bind`."""

    def __init__(self, plan: ExecutionPlan, experts: PreparedExperts, scratch: torch.Tensor) -> None:
        self.plan = plan
        self.experts = experts
        self._path = OpByOp(plan, experts, carve(scratch, plan.scratch))

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor,
        progress: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """Run the routed experts.

        Args:
            x: `[tokens, hidden]` in the plan's io dtype.
            topk_ids: `[tokens, top_k] int32 or int64`; an id outside [0, experts) is no expert.
            topk_weights: `[tokens, top_k]` float16, bfloat16 or float32.
            out: `[tokens, hidden]` in the plan's output dtype; the share's partial sum.
            progress: called with (steps done, steps in all).

        Returns:
            `out`.

        Raises:
            MoeTypeError: if a dtype or device is wrong.
            MoeValueError: if a shape or stride is wrong, or there are more tokens than planned; names both numbers.
        """
        self._check(x, topk_ids, topk_weights, out)
        if x.shape[0] == 0:
            return out
        if self.plan.weights.extent.width == 0:
            return out.zero_()
        return self._path.run(x, topk_ids, topk_weights, out, progress or (lambda done, total: None))

    def _check(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        plan = self.plan
        hidden, tokens = plan.weights.source.geometry.hidden_size, x.shape[0] if x.ndim else 0
        capacity = plan.capacity
        expected: dict[str, tuple[torch.Tensor, tuple[torch.dtype, ...], list[int]]] = {
            "x": (x, (IO_DTYPES[plan.activation.io_dtype],), [tokens, hidden]),
            "topk_ids": (topk_ids, (torch.int32, torch.int64), [tokens, capacity.top_k]),
            "topk_weights": (topk_weights, _WEIGHT_DTYPES, [tokens, capacity.top_k]),
            "out": (out, (IO_DTYPES[plan.activation.output_dtype],), [tokens, hidden]),
        }
        for name, (tensor, dtypes, shape) in expected.items():
            if tensor.dtype not in dtypes:
                raise MoeTypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
            if tensor.device != self.experts.device:
                raise MoeTypeError(f"{name} must be on {self.experts.device}, got {tensor.device}")
            if list(tensor.shape) != shape:
                raise MoeValueError(f"{name} must be {shape}, got {list(tensor.shape)}")
            if not tensor.is_contiguous():
                raise MoeValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tokens > capacity.max_tokens:
            raise MoeValueError(f"{tokens} tokens exceed the plan's {capacity.max_tokens}")


def bind(plan: ExecutionPlan, experts: PreparedExperts, scratch: torch.Tensor | None = None) -> Binding:
    """Fix the addresses of a launch.

    Args:
        plan: the launch.
        experts: prepared weights of the plan's share.
        scratch: `[bytes] uint8` on the weights' device, at least `plan.required_nbytes()`; None allocates it here.

    Raises:
        MoeTypeError: if scratch or weights are on another kind of device than planned.
        MoeValueError: if the weights are of another share, or scratch is too small; names both.
    """
    if experts.device.type != plan.device_type:
        raise MoeTypeError(f"the plan is for {plan.device_type}, the weights are on {experts.device}")
    if experts.extent != plan.weights.extent or experts.source != plan.weights.source:
        raise MoeValueError(f"the weights are of {experts.extent}, the plan of {plan.weights.extent}")
    if scratch is None:
        scratch = torch.empty(plan.required_nbytes(), dtype=torch.uint8, device=experts.device)
    if scratch.device != experts.device:
        raise MoeTypeError(f"scratch must be on {experts.device}, got {scratch.device}")
    return Binding(plan, experts, scratch)
