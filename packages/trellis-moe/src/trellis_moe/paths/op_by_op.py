"""Owns the path that runs one op after the other, each through its planned backend.  It must not choose backends.

map ids -> rotate x into each projection's basis -> gate, up GEMMs -> rotate out, activate, rotate in -> down GEMM
-> rotate out -> weighted sum of each token's routes

Rotated rows are float32 first and go to float16 by a power of two each, which is taken back after the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_format.source import Projection
from trellis_kernels import (
    PackedRoutes,
    activate,
    code_banks,
    grouped_gemm,
    pack_routes,
    reduce_routes,
    rotate_input,
    rotate_output,
)
from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.paths.operands import fit_rows, unscale_rows
from trellis_moe.plan import ExecutionPlan
from trellis_moe.scratch import carve
from trellis_moe.variants import Variant
from trellis_prep import PreparedExperts

__all__ = ["OpByOp"]

Progress = Callable[[int, int], None]


class OpByOp:
    """One layer's launch, op by op, in buffers that were carved beforehand.

    Args:
        plan: the plan.
        variant: which of its launches.
        experts: the layer.
        arena: bytes for its buffers.
        expert_map: `[global experts] int32 or int64`, see `trellis_moe.binding.bind`.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        variant: Variant,
        experts: PreparedExperts,
        arena: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        self._plan, self._variant = plan, variant
        self._experts = experts
        self._expert_map = expert_map
        self._buffers = carve(arena, variant.scratch)
        self._banks = code_banks(experts)

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Progress,
    ) -> torch.Tensor:
        """Launch; arguments as `Binding.run`, already checked, at least one token.

        Raises:
            MoeUnsupportedError: if the stream is being captured.
        """
        plan, variant, experts = self._plan, self._variant, self._experts
        self._check_capture()
        tokens, top_k = topk_ids.shape
        routes = tokens * top_k
        view = {name: buffer[:routes] for name, buffer in self._buffers.items()}
        self._take_routes(topk_ids, topk_weights, view)
        packed = pack_routes(
            view["experts"].view(tokens, top_k),
            num_experts=experts.source.geometry.num_experts,
            block_rows=variant.block_rows,
            backend=variant.backend("pack_routes"),
        )
        steps = len(experts.source.geometry.projections) + 1
        self._branches(x, view, packed, lambda done: progress(done, steps))
        up = view["up"]
        activate(
            view.get("gate"), up, activation=plan.activation.nonlinearity, out=up, backend=variant.backend("activate")
        )
        self._second_gemm(view, packed)
        progress(steps - 1, steps)
        self._sum(view, tokens, out)
        progress(steps, steps)
        return out

    def _check_capture(self) -> None:
        """Refuse what a CUDA graph cannot hold, before CUDA does so with fewer words."""
        if self._experts.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return
        waiting = ", ".join(op for op, backend in self._variant.backends if backend == "cpu")
        reasons = "; ".join(f"not {path}: {reason}" for path, reason in self._variant.rejected)
        raise MoeUnsupportedError(
            f"a CUDA graph cannot hold the launch of up to {self._variant.tokens} tokens: {waiting} run on the torch "
            f"backend, which waits for the device ({reasons})"
        )

    def _branches(
        self, x: torch.Tensor, view: dict[str, torch.Tensor], packed: PackedRoutes, tell: Callable[[int], None]
    ) -> None:
        """Gate and up of every route, as the activation takes them."""
        for index, projection in enumerate(self._experts.source.geometry.projections[:-1]):
            self._first_gemm(x, index, projection, view, packed)
            tell(index + 1)

    def _sum(self, view: dict[str, torch.Tensor], tokens: int, out: torch.Tensor) -> None:
        """Each token's weighted routes."""
        reduce_routes(
            view["route_output"],
            self._sum_weights(view, tokens),
            factor=self._experts.source.up_divisor,
            out=out,
            backend=self._variant.backend("reduce_routes"),
        )

    def _take_routes(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, view: dict[str, torch.Tensor]) -> None:
        """Local expert, token and weight of each route; -1 and 0 for a route that has no expert here."""
        ids, top_k = topk_ids.reshape(-1).long(), topk_ids.shape[1]
        dropped = ids < 0
        if self._expert_map is not None:
            known = self._expert_map.numel()
            dropped |= ids >= known
            ids = self._expert_map.long()[ids.clamp(0, known - 1)]
            dropped |= ids < 0
        dropped |= ids >= self._experts.source.geometry.num_experts
        view["experts"].copy_(ids).masked_fill_(dropped, -1)
        view["tokens"].copy_(torch.arange(ids.numel(), device=ids.device) // top_k)
        view["route_weights"].copy_(topk_weights.reshape(-1)).masked_fill_(dropped, 0.0)

    def _first_gemm(
        self,
        x: torch.Tensor,
        index: int,
        projection: Projection,
        view: dict[str, torch.Tensor],
        packed: PackedRoutes,
    ) -> None:
        experts, variant = self._experts, self._variant
        table = 0 if experts.source.joint_input_scales else index
        if index == 0 or not experts.source.joint_input_scales:
            rotated = view["route_output"]
            rotate_input(
                x,
                experts.input_scales[:, table],
                rows=view["tokens"],
                tables=view["experts"],
                out=rotated,
                backend=variant.backend("rotate_input"),
            )
            self._fit_input(rotated, view)
        branch = view[projection.value]
        grouped_gemm(
            view["rotated_input"], self._banks[index], packed, out=branch, backend=variant.backend("grouped_gemm")
        )
        unscale_rows(branch, view["powers"])
        rotate_output(
            branch,
            experts.intermediate_scales[:, index],
            tables=view["experts"],
            bias=experts.biases.get(projection),
            out=branch,
            backend=variant.backend("rotate_output"),
        )

    def _fit_input(self, rotated: torch.Tensor, view: dict[str, torch.Tensor]) -> None:
        """Rotated rows to the operand of gate and up, by their route weights where those belong to the input."""
        if self._plan.routing.apply_router_weight_on_input:
            rotated.mul_(view["route_weights"][:, None])
        fit_rows(rotated, view["powers"], view["rotated_input"])

    def _sum_weights(self, view: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
        """What multiplies the rows of a token's routes, `[tokens, top_k]`; 0 for a route without an expert here."""
        if self._plan.routing.apply_router_weight_on_input:
            view["route_weights"].copy_(view["experts"] >= 0)
        return view["route_weights"].view(tokens, -1)

    def _second_gemm(self, view: dict[str, torch.Tensor], packed: PackedRoutes) -> None:
        experts, variant = self._experts, self._variant
        last = len(self._banks) - 1
        rotate_input(
            view["up"],
            experts.intermediate_scales[:, last],
            tables=view["experts"],
            out=view["up"],
            backend=variant.backend("rotate_input"),
        )
        fit_rows(view["up"], view["powers"], view["rotated_activation"])
        output = view["route_output"]
        grouped_gemm(
            view["rotated_activation"], self._banks[last], packed, out=output, backend=variant.backend("grouped_gemm")
        )
        unscale_rows(output, view["powers"])
        rotate_output(
            output,
            experts.output_scales,
            tables=view["experts"],
            bias=experts.biases.get(Projection.DOWN),
            out=output,
            backend=variant.backend("rotate_output"),
        )
