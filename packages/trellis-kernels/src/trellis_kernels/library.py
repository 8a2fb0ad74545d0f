"""Owns the ops as `torch.library` custom ops, with fakes, so that graphs of torch.compile can hold them.

It must not know backends.  Importing it registers `torch.ops.trellis.*`.  Custom ops take tensors and plain numbers, so
a rate is the integer 2K, an activation its kind and constants, packed routes their tensors, and a bank its words and
the places of its experts.  Ops that write `out` return nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trellis_format.activations import Activation
from trellis_format.rates import Rate
from trellis_kernels import ops
from trellis_kernels.bank import CodeBank
from trellis_kernels.routes import PackedRoutes, empty_routes

__all__ = [
    "CUSTOM_OPS",
    "activate",
    "decode",
    "grouped_gemm",
    "pack_routes",
    "reduce_routes",
    "rotate_input",
    "rotate_output",
]

_Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("trellis::decode", mutates_args=("out",))
def decode(codes: torch.Tensor, codebook: str, half_bits: int, out: torch.Tensor) -> None:
    """`trellis_kernels.decode`; the rate is 2K."""
    ops.decode(codes, codebook=codebook, rate=Rate(half_bits), out=out)


@torch.library.custom_op("trellis::rotate_input", mutates_args=("out",))
def rotate_input(
    x: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor | None,
    tables: torch.Tensor | None,
    block: int,
    out: torch.Tensor,
) -> None:
    """`trellis_kernels.rotate_input`."""
    ops.rotate_input(x, scales, rows=rows, tables=tables, block=block, out=out)


@torch.library.custom_op("trellis::rotate_output", mutates_args=("out",))
def rotate_output(
    y: torch.Tensor,
    scales: torch.Tensor,
    tables: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: int,
    out: torch.Tensor,
) -> None:
    """`trellis_kernels.rotate_output`; `out` may not be `y`, because torch lets a written argument alias no other."""
    ops.rotate_output(y, scales, tables=tables, bias=bias, block=block, out=out)


@torch.library.custom_op("trellis::activate", mutates_args=("out",))
def activate(
    gate: torch.Tensor | None, up: torch.Tensor, kind: str, limit: float, alpha: float, beta: float, out: torch.Tensor
) -> None:
    """`trellis_kernels.activate`; the law is its kind and constants."""
    ops.activate(gate, up, activation=Activation(kind, limit=limit, alpha=alpha, beta=beta), out=out)


@torch.library.custom_op("trellis::pack_routes", mutates_args=())
def pack_routes(
    topk_ids: torch.Tensor, num_experts: int, block_rows: int, expert_map: torch.Tensor | None, stable: bool
) -> _Packed:
    """`trellis_kernels.pack_routes`; returns the tensors of `PackedRoutes` in their order."""
    packed = ops.pack_routes(
        topk_ids, num_experts=num_experts, block_rows=block_rows, expert_map=expert_map, stable=stable
    )
    return _tensors(packed)


@torch.library.custom_op("trellis::grouped_gemm", mutates_args=("out",))
def grouped_gemm(
    a: torch.Tensor,
    words: torch.Tensor,
    descriptors: torch.Tensor,
    places: Sequence[int],
    codebook: str,
    block_rows: int,
    route_indices: torch.Tensor,
    block_experts: torch.Tensor,
    packed_count: torch.Tensor,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`trellis_kernels.grouped_gemm`; `places` are the bank's, flat: first word and 2K of each expert."""
    pairs = tuple(zip(places[::2], places[1::2], strict=True))
    bank = CodeBank(codebook, a.shape[1], out.shape[1], words, descriptors, pairs)
    routes = PackedRoutes(block_rows, route_indices, block_experts, packed_count, expert_offsets, expert_counts)
    ops.grouped_gemm(a, bank, routes, out=out)


@torch.library.custom_op("trellis::reduce_routes", mutates_args=("accumulator", "out"))
def reduce_routes(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    factor: float,
    accumulator: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`trellis_kernels.reduce_routes`."""
    ops.reduce_routes(rows, topk_weights, factor=factor, accumulator=accumulator, out=out)


@pack_routes.register_fake
def _pack_routes_fake(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_rows: int,
    expert_map: torch.Tensor | None,  # noqa: ARG001  # the signature is the op's
    stable: bool,  # noqa: ARG001  # the signature is the op's
) -> _Packed:
    return _tensors(empty_routes(topk_ids.numel(), num_experts, block_rows, topk_ids.device))


def _nothing(*_given: object, **_keywords: object) -> None:
    """The fake of an op that only writes tensors that it was given."""


for _op in (decode, rotate_input, rotate_output, activate, grouped_gemm, reduce_routes):
    _op.register_fake(_nothing)


def _tensors(packed: PackedRoutes) -> _Packed:
    return (
        packed.route_indices,
        packed.block_experts,
        packed.packed_count,
        packed.expert_offsets,
        packed.expert_counts,
    )


CUSTOM_OPS = {
    "decode": decode,
    "rotate_input": rotate_input,
    "rotate_output": rotate_output,
    "activate": activate,
    "pack_routes": pack_routes,
    "grouped_gemm": grouped_gemm,
    "reduce_routes": reduce_routes,
}
"""The custom op of every op of `trellis_kernels.OPS`, by its name there."""
