"""Owns the binding of a plan to prepared weights and scratch, and its runs.  It must not know containers.

A binding's addresses are fixed.  The torch backend allocates temporaries of its own while it runs; kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch

from trellis_moe.arena_guard import guard_of
from trellis_moe.errors import MoeMemoryError, MoeTypeError, MoeValueError
from trellis_moe.observe import LOG, profile_range
from trellis_moe.paths.fused import FusedLaunch
from trellis_moe.paths.op_by_op import OpByOp
from trellis_moe.paths.transformed import Transformed
from trellis_moe.plan import ExecutionPlan
from trellis_moe.run_checks import RunRules
from trellis_moe.scratch import check_arena
from trellis_moe.session import make_ready
from trellis_moe.specs import ID_DTYPES, check_type
from trellis_moe.variants import Variant
from trellis_prep import PreparedExperts

__all__ = ["Binding", "bind"]

Progress = Callable[[int, int], None]
_Path = FusedLaunch | OpByOp


class Binding:
    """A plan, prepared weights and scratch, ready to run; made by `bind`.

    Attributes:
        plan: the plan.
        experts: the weights.
        expert_map: the map from global ids to the rank's experts, or None.
        counters: launches by variant, named by its most tokens, counted as they are issued; replays of a CUDA graph
            are not seen.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        experts: PreparedExperts,
        scratch: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        *,
        nvtx: bool = False,
    ) -> None:
        self.plan = plan
        self.experts = experts
        self.expert_map = expert_map
        self.counters: dict[int, int] = {variant.tokens: 0 for variant in plan.variants}
        self._nvtx = nvtx
        check_arena(scratch, plan.required_nbytes())
        self._scratch = scratch[: plan.required_nbytes()]  # the rest is not ours
        self._rules = RunRules(plan, self._scratch)
        self._guard = guard_of(scratch)
        self._empty = plan.weights.extent.width == 0
        self._direct = plan.direct_token_capacity
        self._paths = {variant.tokens: self._path(variant) for variant in plan.variants}

    def _path(self, variant: Variant) -> _Path:
        if variant.fused is not None:
            return FusedLaunch(variant, self.experts, self._scratch, self.expert_map)
        path = OpByOp if self.experts.source.expert_transform is None else Transformed
        return path(self.plan, variant, self.experts, self._scratch, self.expert_map)

    @torch.no_grad()  # scratch outlives the launch, so nothing may be recorded in it
    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor,
        progress: Progress | None = None,
    ) -> torch.Tensor:
        """Run the routed experts.

        Args:
            x: `[tokens, hidden]` in the plan's io dtype.
            topk_ids: `[tokens, top_k] int32 or int64`; an id outside [0, experts), or one that the expert map sends
                nowhere, is no expert here and adds nothing, whatever its weight.
            topk_weights: `[tokens, top_k]` float16, bfloat16 or float32; on fused paths ids and weights have the
                dtypes that the plan declares.
            out: `[tokens, hidden]` in the plan's output dtype; the share's partial sum.
            progress: called with (steps done, steps in all).

        Returns:
            `out`.

        Raises:
            MoeTypeError: if a dtype or device is wrong.
            MoeValueError: if a shape or stride is wrong, a tensor does not begin where the kernels can read it, there
                are more tokens than planned, a tensor lies in the scratch or the output in an input, or another run is
                being issued in the same scratch; names both.
        """
        tokens = self._rules.check(x, topk_ids, topk_weights, out)
        if tokens == 0:
            return out
        if self._empty:
            return out.zero_()
        tell = progress or _tell_nobody
        if tokens <= self._direct:
            return self._launch(self.plan.variant_for(tokens), x, topk_ids, topk_weights, out, tell)
        for first, count, variant in self.plan.cut(tokens):
            part = slice(first, first + count)
            share = _share(first, count, tokens, tell)
            self._launch(variant, x[part], topk_ids[part], topk_weights[part], out[part], share)
        return out

    @torch.no_grad()
    def launch(
        self,
        variant: Variant,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """One launch through a given variant, whatever `run` would take for so many tokens.

        Args:
            variant: of the plan.
            x: as for `run`, at most `variant.tokens` tokens, at least one; likewise the others.
            topk_ids: see `run`.
            topk_weights: see `run`.
            out: see `run`.

        Raises:
            MoeTypeError, MoeValueError: as `run`, or if the launch takes fewer tokens.
        """
        tokens = self._rules.check(x, topk_ids, topk_weights, out)
        if tokens > variant.tokens:
            raise MoeValueError(f"{tokens} tokens exceed the launch's {variant.tokens}")
        return self._launch(variant, x, topk_ids, topk_weights, out, _tell_nobody)

    def _launch(
        self,
        variant: Variant,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Progress,
    ) -> torch.Tensor:
        self.counters[variant.tokens] += 1
        path = self._paths[variant.tokens]
        with self._guard:
            if not self._nvtx:
                return path.run(x, topk_ids, topk_weights, out, progress)
            with profile_range(f"trellis {variant.path} {x.shape[0]} of {variant.tokens}", self.experts.device):
                return path.run(x, topk_ids, topk_weights, out, progress)


def bind(
    plan: ExecutionPlan,
    experts: PreparedExperts,
    scratch: torch.Tensor | None = None,
    *,
    expert_map: torch.Tensor | None = None,
    nvtx: bool = False,
) -> Binding:
    """Fix the addresses of a layer's runs, with every kernel ready to launch.

    Args:
        plan: the runs.
        experts: prepared weights of the plan's share.
        scratch: `[bytes] uint8` on the weights' device, at least `plan.required_nbytes()`; None allocates it here.
        expert_map: `[global experts] int32 or int64` on the weights' device, contiguous: the rank's expert of each
            global id, -1 for none; entries of 31 bits.  Read at every run, so that changes in place are followed.
            None: ids are the rank's own.
        nvtx: whether each launch is a named range for profilers.

    Raises:
        MoeTypeError: if an argument is of another type, or scratch, map or weights are on another device than planned.
        MoeValueError: if the weights are of another layer or share, scratch is too small, or the map has another length
            than the plan's ids; names both.
        MoeMemoryError: if memory runs out; names what it was for, and where.
        ColdKernelError: if kernels are frozen and one of the plan's is not ready; names its key.
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
        with _memory(f"scratch of {plan.required_nbytes()} bytes", experts.device):
            scratch = torch.empty(plan.required_nbytes(), dtype=torch.uint8, device=experts.device)
    check_type("scratch", scratch, torch.Tensor)
    if scratch.device != experts.device:
        raise MoeTypeError(f"scratch must be on {experts.device}, got {scratch.device}")
    _check_map(plan, experts, expert_map)
    LOG.debug("binding a plan: %s", plan.explain())
    with _memory("a binding's kernels and tables", experts.device):
        make_ready(plan)
        return Binding(plan, experts, scratch, expert_map, nvtx=nvtx)


@contextmanager
def _memory(what: str, device: torch.device) -> Iterator[None]:
    """Name what memory was for where it runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not typed and "allocate memory" not in str(error):  # torch has no type of its own for a CPU's failure
            raise
        raise MoeMemoryError(f"{what} cannot be had on {device}: {str(error).splitlines()[0]}") from error


def _check_map(plan: ExecutionPlan, experts: PreparedExperts, expert_map: torch.Tensor | None) -> None:
    known = plan.capacity.route_experts
    if expert_map is None:
        if known is not None:
            raise MoeValueError(f"the plan's ids are of {known} experts; a binding needs an expert map of that length")
        return
    check_type("expert_map", expert_map, torch.Tensor)
    if expert_map.dtype not in ID_DTYPES.values():
        raise MoeTypeError(f"expert_map must be torch.int32 or torch.int64, got {expert_map.dtype}")
    if expert_map.device != experts.device:
        raise MoeTypeError(f"expert_map must be on {experts.device}, got {expert_map.device}")
    if expert_map.ndim != 1 or not expert_map.numel() or not expert_map.is_contiguous():
        raise MoeValueError(
            f"expert_map must be one contiguous axis of at least one expert, got shape {list(expert_map.shape)}, "
            f"strides {expert_map.stride()}"
        )
    if known is not None and expert_map.numel() != known:
        raise MoeValueError(f"expert_map has {expert_map.numel()} experts, the plan's ids are of {known}")


def _tell_nobody(_done: int, _total: int) -> None:
    """The progress of a run that nobody watches."""


def _share(first: int, count: int, tokens: int, tell: Progress) -> Progress:
    """Progress of one launch as progress over all tokens."""
    return lambda done, total: tell(first * total + count * done, tokens * total)


def _difference(experts: PreparedExperts, plan: ExecutionPlan) -> str:
    """The first field in which two layers differ, with both values."""
    names = (field.name for field in fields(experts.source))
    pairs = ((name, getattr(experts.source, name), getattr(plan.weights.source, name)) for name in names)
    return next(f"{name} {mine!r} against {planned!r}" for name, mine, planned in pairs if mine != planned)
