"""Owns the binding of a plan to prepared weights and scratch, and its launch.  It must not know containers.

A binding's addresses are fixed.  The torch backend allocates temporaries of its own while it runs; kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from trellis_kernels.layers import MoeSmallKey
from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.paths.fused import FewTokens, ManyTokens
from trellis_moe.paths.op_by_op import OpByOp
from trellis_moe.plan import ExecutionPlan
from trellis_moe.scratch import carve
from trellis_moe.specs import ID_DTYPES, IO_DTYPES, check_type
from trellis_prep import PreparedExperts

__all__ = ["Binding", "bind"]


class Binding:
    """A plan, prepared weights and scratch, ready to run; made by `bind`."""

    def __init__(self, plan: ExecutionPlan, experts: PreparedExperts, scratch: torch.Tensor) -> None:
        self.plan = plan
        self.experts = experts
        buffers = carve(scratch, plan.scratch)
        self._path: FewTokens | ManyTokens | OpByOp
        self._id_dtypes: tuple[torch.dtype, ...] = tuple(ID_DTYPES.values())
        self._weight_dtypes: tuple[torch.dtype, ...] = tuple(IO_DTYPES.values())
        if plan.fused is None:
            self._path = OpByOp(plan, experts, buffers)
        else:  # kernels are compiled for the dtypes that the plan declares
            self._id_dtypes = (ID_DTYPES[plan.routing.id_dtype],)
            self._weight_dtypes = (IO_DTYPES[plan.routing.weight_dtype],)
            if isinstance(plan.fused, MoeSmallKey):
                self._path = FewTokens(plan, plan.fused, experts, buffers)
            else:
                self._path = ManyTokens(plan.fused, experts, buffers)
        self._scratch = scratch[: plan.required_nbytes()]  # the rest is not ours

    @torch.no_grad()  # scratch outlives the launch, so nothing may be recorded in it
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
            topk_ids: `[tokens, top_k] int32 or int64`; an id outside [0, experts) is no expert and adds nothing,
                whatever its weight.
            topk_weights: `[tokens, top_k]` float16, bfloat16 or float32; on the fused path ids and weights have the
                dtypes that the plan declares.
            out: `[tokens, hidden]` in the plan's output dtype; the share's partial sum.
            progress: called with (steps done, steps in all).

        Returns:
            `out`.

        Raises:
            MoeTypeError: if a dtype or device is wrong.
            MoeValueError: if a shape or stride is wrong, there are more tokens than planned, or a tensor lies in the
                scratch or the output in an input; names both numbers.
        """
        self._check(x, topk_ids, topk_weights, out)
        if x.shape[0] == 0:
            return out
        if self.plan.weights.extent.width == 0:
            return out.zero_()
        return self._path.run(x, topk_ids, topk_weights, out, progress or (lambda _done, _total: None))

    def _check(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        plan = self.plan
        check_type("x", x, torch.Tensor)
        hidden, tokens = plan.weights.source.geometry.hidden_size, x.shape[0] if x.ndim else 0
        capacity = plan.capacity
        expected: dict[str, tuple[torch.Tensor, tuple[torch.dtype, ...], list[int]]] = {
            "x": (x, (IO_DTYPES[plan.activation.io_dtype],), [tokens, hidden]),
            "topk_ids": (topk_ids, self._id_dtypes, [tokens, capacity.top_k]),
            "topk_weights": (topk_weights, self._weight_dtypes, [tokens, capacity.top_k]),
            "out": (out, (IO_DTYPES[plan.activation.output_dtype],), [tokens, hidden]),
        }
        for name, (tensor, dtypes, shape) in expected.items():
            check_type(name, tensor, torch.Tensor)
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
        for name, (tensor, _, _) in expected.items():
            _check_apart(name, tensor, "scratch", self._scratch)
            if name != "out":
                _check_apart("out", out, name, tensor)


def bind(plan: ExecutionPlan, experts: PreparedExperts, scratch: torch.Tensor | None = None) -> Binding:
    """Fix the addresses of a launch.

    Args:
        plan: the launch.
        experts: prepared weights of the plan's share.
        scratch: `[bytes] uint8` on the weights' device, at least `plan.required_nbytes()`; None allocates it here.

    Raises:
        MoeTypeError: if an argument is of another type, or scratch or weights are on another device than planned.
        MoeValueError: if the weights are of another layer or share, or scratch is too small; names both.
    """
    check_type("plan", plan, ExecutionPlan)
    check_type("experts", experts, PreparedExperts)
    if experts.device.type != plan.device_type:
        raise MoeTypeError(f"the plan is for {plan.device_type}, the weights are on {experts.device}")
    if experts.extent != plan.weights.extent:
        raise MoeValueError(f"the weights are of {experts.extent}, the plan of {plan.weights.extent}")
    if experts.source != plan.weights.source:
        raise MoeValueError(f"the weights are of another layer than the plan: {_difference(experts, plan)}")
    if scratch is None:
        scratch = torch.empty(plan.required_nbytes(), dtype=torch.uint8, device=experts.device)
    check_type("scratch", scratch, torch.Tensor)
    if scratch.device != experts.device:
        raise MoeTypeError(f"scratch must be on {experts.device}, got {scratch.device}")
    return Binding(plan, experts, scratch)


def _difference(experts: PreparedExperts, plan: ExecutionPlan) -> str:
    """The first field in which two layers differ, with both values."""
    names = (field.name for field in fields(experts.source))
    pairs = ((name, getattr(experts.source, name), getattr(plan.weights.source, name)) for name in names)
    return next(f"{name} {mine!r} against {planned!r}" for name, mine, planned in pairs if mine != planned)


def _check_apart(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    first, second = _span(tensor), _span(other)
    if first[0] < second[1] and second[0] < first[1]:
        raise MoeValueError(
            f"{name} at bytes {first[0]}..{first[1]} overlaps {other_name} at {second[0]}..{second[1]}; a launch needs "
            "them apart"
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a contiguous tensor: first byte, and the one past the last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
