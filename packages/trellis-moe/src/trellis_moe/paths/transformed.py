"""Owns the path of experts under an intermediate Hadamard, op after op.  It must not choose backends.

tokens: H512 -> rotate in -> both GEMMs -> slots of both, interleaved: rotate out, H, signs -> even gate, odd up
-> activate -> signs, H -> rotate in -> down GEMM -> rotate out -> weighted sum of each token's routes -> H512

The two stored matrices are rotations of gate and up together, so neither branch exists before they are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_format.extent import SLOT
from trellis_format.source import Projection
from trellis_kernels import PackedRoutes, grouped_gemm, reduce_routes, rotate_input, rotate_output
from trellis_moe.paths.op_by_op import OpByOp
from trellis_moe.paths.operands import unscale_rows
from trellis_moe.plan import ExecutionPlan
from trellis_moe.variants import Variant
from trellis_prep import PreparedExperts

__all__ = ["Transformed"]


class Transformed(OpByOp):
    """One layer's launch under an intermediate Hadamard; arguments as `OpByOp`.

    Keeps two small tables of its own: ones for the hidden axis, and the output vectors of both matrices interleaved.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        variant: Variant,
        experts: PreparedExperts,
        arena: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        super().__init__(plan, variant, experts, arena, expert_map)
        transform = experts.source.expert_transform
        assert transform is not None  # a binding takes this path for such layers alone
        hidden = experts.source.geometry.padded_hidden_size
        self._block = transform.pre_block
        self._ones = torch.ones(1, hidden, dtype=torch.float16, device=experts.device)
        vectors = experts.intermediate_scales
        self._vectors = torch.empty(vectors.shape[0], 2 * vectors.shape[2], dtype=vectors.dtype, device=vectors.device)
        _interleave(vectors[:, 0], vectors[:, 1], self._vectors)

    def _branches(
        self, x: torch.Tensor, view: dict[str, torch.Tensor], packed: PackedRoutes, tell: Callable[[int], None]
    ) -> None:
        experts, variant, tables = self._experts, self._variant, view["experts"]
        backend = variant.backend("rotate_input")
        tokens = self._buffers["by_token"][: x.shape[0]]
        rotate_input(x, self._ones, block=self._block, out=tokens, backend=backend)
        rotated = view["route_output"]
        vectors = experts.input_scales[:, 0]
        rotate_input(tokens, vectors, rows=view["tokens"], tables=tables, out=rotated, backend=backend)
        self._fit_input(rotated, view)
        for index, projection in enumerate((Projection.GATE, Projection.UP)):
            stored = view[projection.value]
            grouped_gemm(
                view["rotated_input"], self._banks[index], packed, out=stored, backend=variant.backend("grouped_gemm")
            )
            unscale_rows(stored, view["powers"])
            tell(index + 1)
        both, backend = view["interleaved"], variant.backend("rotate_output")
        _interleave(view["gate"], view["up"], both)
        rotate_output(both, self._vectors, tables=tables, out=both, backend=backend)
        rotate_output(both, experts.signs["pre"], tables=tables, out=both, backend=backend)
        view["gate"].copy_(both[:, 0::2])
        view["up"].copy_(both[:, 1::2])

    def _second_gemm(self, view: dict[str, torch.Tensor], packed: PackedRoutes) -> None:
        rotate_input(
            view["up"],
            self._experts.signs["post"],
            tables=view["experts"],
            out=view["up"],
            backend=self._variant.backend("rotate_input"),
        )
        super()._second_gemm(view, packed)

    def _sum(self, view: dict[str, torch.Tensor], tokens: int, out: torch.Tensor) -> None:
        total = self._buffers["by_token"][:tokens]
        reduce_routes(
            view["route_output"],
            self._sum_weights(view, tokens),
            factor=self._experts.source.up_divisor,
            out=total,
            backend=self._variant.backend("reduce_routes"),
        )
        rotate_output(total, self._ones, block=self._block, out=out, backend=self._variant.backend("rotate_output"))


def _interleave(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    """Slots of two matrices of rows in turn: `[rows, width]` each into `[rows, 2 * width]`."""
    rows, width = first.shape
    places = out.view(rows, width // SLOT, 2, SLOT)
    places[:, :, 0].copy_(first.reshape(rows, width // SLOT, SLOT))
    places[:, :, 1].copy_(second.reshape(rows, width // SLOT, SLOT))
