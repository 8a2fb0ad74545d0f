"""Owns formulas of scratch: what a layer takes whose steps each write all their rows.  It must not know plans.

A plan's own scratch is `ExecutionPlan.required_nbytes()`.  These are the sizes to hold it against, those of the two
designs in common use, item by item:

    packed     rows of the GEMMs in the io dtype, summed per route, or in one fp32 accumulator (`fused_sum`)
    rotated    the same around trellis codes: rows are rotated first, and the sum is rotated back

R = tokens * top_k routes, C = channels of the first GEMM (gate and up), every tensor aligned to 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trellis_kernels import route_capacity
from trellis_moe.specs import MoeGeometry

__all__ = ["Workload", "packed_workspace", "rotated_workspace", "route_blocks"]

_BLOCKS = (8, 16, 32, 48, 64)
_FILL = 0.9
_ALIGNMENT = 16
_HALF, _WORD = 2, 4
_TILES_PER_SM, _TILE_COLUMNS = 4, 256  # blocks of partial sums that a multiprocessor may hold, and their width


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the formulas read.

    Args:
        geometry: sizes of a rank's share.
        tokens: of a launch.
        top_k: routes of a token.
        multiprocessors: of the device.
        gated: whether the experts have a gate.
    """

    geometry: MoeGeometry
    tokens: int
    top_k: int
    multiprocessors: int
    gated: bool = True

    @property
    def routes(self) -> int:
        """R."""
        return self.tokens * self.top_k

    @property
    def first_channels(self) -> int:
        """C."""
        return self.geometry.intermediate_size * (2 if self.gated else 1)


def route_blocks(workload: Workload) -> int:
    """Rows of a route block: the smallest that an average expert fills to less than nine tenths, at most 64."""
    average = workload.routes / workload.geometry.num_experts
    return next((rows for rows in _BLOCKS if average < _FILL * rows), _BLOCKS[-1])


def packed_workspace(workload: Workload, *, fused_sum: bool) -> dict[str, int]:
    """Bytes of each tensor of the packed design with 16-bit io, routing included.

    Args:
        workload: the launch.
        fused_sum: whether routes are added to an fp32 accumulator where the second GEMM ends.
    """
    geometry, tokens, routes = workload.geometry, workload.tokens, workload.routes
    block = route_blocks(workload)
    reachable = [rows for rows in _BLOCKS if rows <= block]
    hidden = geometry.hidden_size
    rows = max(routes * workload.first_channels, tokens * hidden) if fused_sum else routes * _widest(workload)
    parts = {
        "logits": _HALF * tokens * geometry.num_experts,
        "topk_logits": _WORD * routes,
        "topk_ids": _WORD * routes,
        "topk_weights": _WORD * routes,
        **_rows(workload, rows, block),
        **_packing(workload, reachable),
    }
    if fused_sum:
        parts["sum"] = _WORD * tokens * hidden
    return {name: _aligned(nbytes) for name, nbytes in parts.items()}


def rotated_workspace(workload: Workload, *, joint_inputs: bool) -> dict[str, int]:
    """Bytes of each tensor of the rotated design, routing left out; the last one is not rounded up.

    Args:
        workload: the launch.
        joint_inputs: whether gate and up share one rotated input.
    """
    hidden, block = workload.geometry.hidden_size, route_blocks(workload)
    parts = {
        **_rows(workload, workload.routes * _widest(workload), block),
        **_packing(workload, [block]),
        "rotated_output": _WORD * workload.tokens * hidden,
        "rotated_input": _HALF * workload.routes * hidden,
    }
    if not joint_inputs:
        parts["rotated_input_up"] = _HALF * workload.routes * hidden
    rounded = {name: _aligned(nbytes) for name, nbytes in parts.items()}
    return rounded | {"barriers": _WORD * (_TILES_PER_SM * workload.multiprocessors + 2)}


def _widest(workload: Workload) -> int:
    return max(workload.first_channels, workload.geometry.hidden_size)


def _rows(workload: Workload, first_rows: int, block: int) -> dict[str, int]:
    """Rows between the steps, and the partial sums of both GEMMs."""
    return {
        "first_rows": _HALF * first_rows,
        "second_rows": _HALF * workload.routes * workload.geometry.intermediate_size,
        "first_sums": _WORD * _sums(workload, workload.first_channels, block),
        "second_sums": _WORD * _sums(workload, workload.geometry.hidden_size, block),
    }


def _sums(workload: Workload, channels: int, block: int) -> int:
    """Partial sums of a GEMM: all of them, or what the device's thread blocks hold; twice that for blocks of 8 rows."""
    slots = route_capacity(workload.routes, workload.geometry.num_experts, block)
    held = min(channels * slots, workload.multiprocessors * _TILES_PER_SM * block * _TILE_COLUMNS)
    return max(held * (2 if block == _BLOCKS[0] else 1), 1)


def _packing(workload: Workload, blocks: list[int]) -> dict[str, int]:
    """Packed routes for every size of block that a launch may take."""
    experts = workload.geometry.num_experts
    slots = {rows: route_capacity(workload.routes, experts, rows) for rows in blocks}
    return {
        "packed_routes": _WORD * max(slots.values()),
        "block_experts": _WORD * max(-(-count // rows) for rows, count in slots.items()),
        "packed_count": _WORD,
        "expert_offsets": _WORD * (experts + 1),
        "expert_counts": _WORD * experts,
    }


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
