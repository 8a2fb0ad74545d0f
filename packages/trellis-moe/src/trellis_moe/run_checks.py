"""Owns the rules for the tensors of a run, checked before each one in a few microseconds.  It must not launch.

What is right is found without building anything; only a refusal takes the time to say what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.plan import ExecutionPlan
from trellis_moe.specs import ID_DTYPES, IO_DTYPES, check_type

__all__ = ["RunRules"]

_FUSED_BOUNDARY = 16  # bytes, on which kernels read rows of x and write rows of out


class RunRules:
    """The rules of one binding.

    Args:
        plan: the plan.
        scratch: the bytes of the arena that the binding uses.
    """

    def __init__(self, plan: ExecutionPlan, scratch: torch.Tensor) -> None:
        # kernels are compiled for the dtypes that the plan declares, the torch backend takes any
        fused = any(variant.fused is not None for variant in plan.variants)
        routing, hidden, top_k = plan.routing, plan.weights.source.geometry.hidden_size, plan.capacity.top_k
        ids = (ID_DTYPES[routing.id_dtype],) if fused else tuple(ID_DTYPES.values())
        weights = (IO_DTYPES[routing.weight_dtype],) if fused else tuple(IO_DTYPES.values())
        self._rules: tuple[tuple[str, tuple[torch.dtype, ...], int], ...] = (
            ("x", (IO_DTYPES[plan.activation.io_dtype],), hidden),
            ("topk_ids", ids, top_k),
            ("topk_weights", weights, top_k),
            ("out", (IO_DTYPES[plan.activation.output_dtype],), hidden),
        )
        self._boundary = _FUSED_BOUNDARY if fused else 1
        self._max_tokens = plan.capacity.max_tokens
        self._device = scratch.device
        self._scratch = _span(scratch)

    def check(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> int:
        """Accept the tensors of a run.

        Returns:
            Their tokens.

        Raises:
            MoeTypeError, MoeValueError: as `trellis_moe.binding.Binding.run`.
        """
        given = (x, topk_ids, topk_weights, out)
        check_type("x", x, torch.Tensor)
        tokens = x.shape[0] if x.ndim else 0
        device = self._device
        for tensor, (name, dtypes, channels) in zip(given, self._rules, strict=True):
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.dtype in dtypes
                and tensor.device == device
                and tensor.shape == (tokens, channels)
                and tensor.is_contiguous()
            ):
                self._refuse(name, tensor, dtypes, [tokens, channels])
        if tokens > self._max_tokens:
            raise MoeValueError(f"{tokens} tokens exceed the plan's {self._max_tokens}")
        self._check_apart(given)
        return int(tokens)

    def _refuse(self, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: list[int]) -> None:
        check_type(name, tensor, torch.Tensor)
        if tensor.dtype not in dtypes:
            raise MoeTypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.device != self._device:
            raise MoeTypeError(f"{name} must be on {self._device}, got {tensor.device}")
        if tensor.ndim != 2:
            raise MoeValueError(f"{name} must have two axes, [tokens, {shape[1]}], got {list(tensor.shape)}")
        if list(tensor.shape) != shape:
            raise MoeValueError(f"{name} must be {shape}, got {list(tensor.shape)}")
        raise MoeValueError(f"{name} must be contiguous, got strides {tensor.stride()}")

    def _check_apart(self, given: Sequence[torch.Tensor]) -> None:
        """Accept rows from a boundary on, tensors apart from the scratch, and an output apart from the inputs."""
        spans = [_span(tensor) for tensor in given]
        first, last = self._scratch
        for index, (begin, end) in enumerate(spans):
            if begin < last and first < end:
                self._overlap(index, spans[index], "scratch", self._scratch)
        for index in (0, -1):
            if spans[index][0] % self._boundary:
                raise MoeValueError(
                    f"{self._rules[index][0]} must begin on a boundary of {self._boundary} bytes, got "
                    f"{spans[index][0] % self._boundary} past one"
                )
        begin, end = spans[-1]
        for index, (start, stop) in enumerate(spans[:-1]):
            if start < end and begin < stop:
                self._overlap(len(spans) - 1, spans[-1], self._rules[index][0], spans[index])

    def _overlap(self, index: int, mine: tuple[int, int], name: str, other: tuple[int, int]) -> None:
        mine_text, other_text = (f"{first}..{last}" for first, last in (mine, other))
        raise MoeValueError(
            f"{self._rules[index][0]} at bytes {mine_text} overlaps {name} at {other_text}; a launch needs them apart"
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a contiguous tensor: first byte, and the one past the last."""
    first = tensor.data_ptr()
    return first, first + tensor.nbytes
