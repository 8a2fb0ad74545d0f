"""Owns the argument rules of each op, so that its backends refuse the same calls with the same words.

It must not know backends: what only a kernel needs, such as alignment, is checked beside the kernel.
"""

from __future__ import annotations

import torch

from trellis_format.activations import Activation
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.rates import Rate
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.errors import KernelValueError

__all__ = [
    "FULL_TABLE_CODEBOOK",
    "FULL_TABLE_RATE",
    "ROTATION_BLOCKS",
    "TABLES",
    "check_activate",
    "check_reduce_routes",
    "check_rotate_input",
    "check_rotate_output",
    "check_table",
    "check_topk_ids",
]

ROTATION_BLOCKS = (HADAMARD_BLOCK, 4 * HADAMARD_BLOCK)
"""Channels of a Hadamard block: that of every linear, and that of the intermediate transform over the hidden axis."""

TABLES = ("compact", "full")
"""Forms of a codebook's table in shared memory; codebooks without one are compact."""
FULL_TABLE_CODEBOOK = "lut_e4m3"
"""The one codebook that has a full table, a byte for each of 65,536 states."""
FULL_TABLE_RATE = Rate(4)
"""The one rate, K = 2, that it has it for."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)


def check_table(table: str, codebook: str, rate: Rate) -> None:
    """Accept a form of a codebook's table.

    Raises:
        KernelValueError: if it is unknown, or full where there is no full table.
    """
    if table not in TABLES:
        raise KernelValueError(f"table {table!r} is not one of {', '.join(TABLES)}")
    if table == "full" and (codebook, rate) != (FULL_TABLE_CODEBOOK, FULL_TABLE_RATE):
        raise KernelValueError(
            f"codebook {codebook} at K = {rate} has no full table; {FULL_TABLE_CODEBOOK} has one at "
            f"K = {FULL_TABLE_RATE}; compact is legal for every codebook"
        )


def check_rotate_input(
    x: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor | None,
    tables: torch.Tensor | None,
    block: int,
    out: torch.Tensor,
) -> None:
    """Accept the arguments of `trellis_kernels.ops.rotate_input`.

    Raises:
        KernelTypeError, KernelValueError: as the op.
    """
    check_dtype("x", x, *_FLOATS)
    check_dtype("out", out, torch.float16, torch.float32)
    check_shape("x", x, None, None)
    channels = _check_scales(scales, block, x.device)
    if x.shape[1] > channels:
        raise KernelValueError(f"x has {x.shape[1]} channels, the scales {channels}")
    if rows is not None:
        check_dtype("rows", rows, *_INTEGERS)
        check_shape("rows", rows, None)
    count = x.shape[0] if rows is None else rows.shape[0]
    check_shape("out", out, count, channels)
    _check_tables(tables, count)
    check_device(x.device, out=out, rows=rows, tables=tables)


def check_rotate_output(
    y: torch.Tensor,
    scales: torch.Tensor,
    tables: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: int,
    out: torch.Tensor,
) -> None:
    """Accept the arguments of `trellis_kernels.ops.rotate_output`.

    Raises:
        KernelTypeError, KernelValueError: as the op.
    """
    check_dtype("y", y, *_FLOATS)
    check_dtype("out", out, *_FLOATS)
    channels = _check_scales(scales, block, y.device)
    check_shape("y", y, None, channels)
    check_shape("out", out, y.shape[0], channels)
    _check_tables(tables, y.shape[0])
    check_device(y.device, out=out, tables=tables, bias=bias)
    if bias is not None:
        check_dtype("bias", bias, torch.float16)
        check_shape("bias", bias, None, channels)
        _check_has_row("bias", bias)


def check_activate(gate: torch.Tensor | None, up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    """Accept the arguments of `trellis_kernels.ops.activate`.

    Raises:
        KernelTypeError, KernelValueError: as the op.
    """
    check_dtype("up", up, torch.float32)
    check_dtype("out", out, torch.float32)
    check_shape("out", out, *up.shape)
    check_device(up.device, out=out, gate=gate)
    if (gate is not None) != activation.gated:
        raise KernelValueError(f"activation {activation.kind} takes {'a' if activation.gated else 'no'} gate")
    if gate is not None:
        check_dtype("gate", gate, torch.float32)
        check_shape("gate", gate, *up.shape)


def check_topk_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> None:
    """Accept the tensors of `trellis_kernels.ops.pack_routes`.

    Raises:
        KernelTypeError, KernelValueError: as the op.
    """
    check_dtype("topk_ids", topk_ids, *_INTEGERS)
    check_shape("topk_ids", topk_ids, None, None)
    if expert_map is not None:
        check_dtype("expert_map", expert_map, *_INTEGERS)
        check_shape("expert_map", expert_map, None)
        check_device(topk_ids.device, expert_map=expert_map)


def check_reduce_routes(
    rows: torch.Tensor, topk_weights: torch.Tensor, accumulator: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Accept the tensors of `trellis_kernels.ops.reduce_routes`.

    Raises:
        KernelTypeError, KernelValueError: as the op.
    """
    check_dtype("rows", rows, torch.float32)
    check_dtype("topk_weights", topk_weights, *_FLOATS)
    check_dtype("out", out, *_FLOATS)
    check_shape("topk_weights", topk_weights, None, None)
    check_device(rows.device, topk_weights=topk_weights, out=out)
    tokens, top_k = topk_weights.shape
    check_shape("rows", rows, tokens * top_k, None)
    check_shape("out", out, tokens, None)
    if out.shape[1] > rows.shape[1]:
        raise KernelValueError(f"out has {out.shape[1]} channels, the rows {rows.shape[1]}")
    if accumulator is None:
        return
    check_dtype("accumulator", accumulator, torch.float32)
    check_dtype("out of an atomic sum", out, torch.float16, torch.bfloat16)
    check_shape("accumulator", accumulator, None, rows.shape[1])
    check_device(rows.device, accumulator=accumulator)
    if accumulator.shape[0] < tokens:
        raise KernelValueError(f"accumulator must have at least {tokens} rows, got {accumulator.shape[0]}")


def _check_scales(scales: torch.Tensor, block: int, device: torch.device) -> int:
    if block not in ROTATION_BLOCKS:
        raise KernelValueError(f"block {block} is not one of {', '.join(map(str, ROTATION_BLOCKS))}")
    check_dtype("scales", scales, torch.float16)
    check_shape("scales", scales, None, None)
    check_device(device, scales=scales)
    channels = scales.shape[1]
    if channels % block:
        raise KernelValueError(f"scales have {channels} channels, not a multiple of {block}")
    _check_has_row("scales", scales)
    return channels


def _check_has_row(name: str, table: torch.Tensor) -> None:
    if not table.shape[0]:
        raise KernelValueError(f"{name} must have at least 1 row, got {list(table.shape)}")


def _check_tables(tables: torch.Tensor | None, count: int) -> None:
    if tables is not None:
        check_dtype("tables", tables, *_INTEGERS)
        check_shape("tables", tables, count)
