"""Owns the path that runs one op after the other, each through its planned backend.  It must not choose backends.

rotate x into each projection's basis -> gate, up GEMMs -> rotate out, activate, rotate in -> down GEMM
-> rotate out -> weighted sum of each token's routes
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
from trellis_moe.plan import ExecutionPlan
from trellis_prep import PreparedExperts

__all__ = ["OpByOp"]

Progress = Callable[[int, int], None]


class OpByOp:
    """One layer's launch, op by op, in buffers that were carved beforehand."""

    def __init__(self, plan: ExecutionPlan, experts: PreparedExperts, buffers: dict[str, torch.Tensor]) -> None:
        self._plan = plan
        self._experts = experts
        self._buffers = buffers
        self._banks = code_banks(experts)

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        progress: Progress,
    ) -> torch.Tensor:
        """Launch; arguments as `Binding.run`, already checked, at least one token."""
        plan, experts = self._plan, self._experts
        tokens, top_k = topk_ids.shape
        routes = tokens * top_k
        view = {name: buffer[:routes] for name, buffer in self._buffers.items()}
        num_experts = experts.source.geometry.num_experts
        flat = topk_ids.reshape(-1)
        dropped = (flat < 0) | (flat >= num_experts)
        view["experts"].copy_(flat).masked_fill_(dropped, -1)
        view["tokens"].copy_(torch.arange(routes, device=x.device) // top_k)
        view["route_weights"].copy_(topk_weights.reshape(-1)).masked_fill_(dropped, 0.0)
        packed = pack_routes(
            topk_ids, num_experts=num_experts, block_rows=plan.block_rows, backend=plan.backend("pack_routes")
        )
        projections = experts.source.geometry.projections
        steps = len(projections) + 1
        for index, projection in enumerate(projections[:-1]):
            self._first_gemm(x, index, projection, view, packed)
            progress(index + 1, steps)
        up = view["up"]
        activate(
            view.get("gate"), up, activation=plan.activation.nonlinearity, out=up, backend=plan.backend("activate")
        )
        self._second_gemm(view, packed)
        progress(len(projections), steps)
        reduce_routes(
            view["route_output"],
            view["route_weights"].view(tokens, top_k),
            factor=experts.source.up_divisor,
            out=out,
            backend=plan.backend("reduce_routes"),
        )
        progress(steps, steps)
        return out

    def _first_gemm(
        self,
        x: torch.Tensor,
        index: int,
        projection: Projection,
        view: dict[str, torch.Tensor],
        packed: PackedRoutes,
    ) -> None:
        experts, plan = self._experts, self._plan
        table = 0 if experts.source.joint_input_scales else index
        if index == 0 or not experts.source.joint_input_scales:
            rotate_input(
                x,
                experts.input_scales[:, table],
                rows=view["tokens"],
                tables=view["experts"],
                out=view["rotated_input"],
                backend=plan.backend("rotate_input"),
            )
        branch = view[projection.value]
        grouped_gemm(
            view["rotated_input"], self._banks[index], packed, out=branch, backend=plan.backend("grouped_gemm")
        )
        rotate_output(
            branch,
            experts.intermediate_scales[:, index],
            tables=view["experts"],
            bias=experts.biases.get(projection),
            out=branch,
            backend=plan.backend("rotate_output"),
        )

    def _second_gemm(self, view: dict[str, torch.Tensor], packed: PackedRoutes) -> None:
        experts, plan = self._experts, self._plan
        last = len(self._banks) - 1
        rotate_input(
            view["up"],
            experts.intermediate_scales[:, last],
            tables=view["experts"],
            out=view["rotated_activation"],
            backend=plan.backend("rotate_input"),
        )
        output = view["route_output"]
        grouped_gemm(
            view["rotated_activation"], self._banks[last], packed, out=output, backend=plan.backend("grouped_gemm")
        )
        rotate_output(
            output,
            experts.output_scales,
            tables=view["experts"],
            bias=experts.biases.get(Projection.DOWN),
            out=output,
            backend=plan.backend("rotate_output"),
        )
