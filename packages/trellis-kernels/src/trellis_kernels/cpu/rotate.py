"""Owns the torch rotations: scale then Hadamard on the way in, Hadamard then scale on the way out.

It must not know experts beyond the row of a table.
"""

from __future__ import annotations

import math

import torch
from trellis_format.hadamard import HADAMARD_BLOCK

from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.errors import KernelValueError

__all__ = ["rotate_input", "rotate_output"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)


def rotate_input(
    x: torch.Tensor,
    scales: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    tables: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = H128(x[rows[i]] * scales[tables[i]]); see `trellis_kernels.ops.rotate_input`."""
    check_dtype("x", x, *_FLOATS)
    check_dtype("out", out, torch.float16, torch.float32)
    check_shape("x", x, None, None)
    channels = _check_scales(scales, x.device)
    if x.shape[1] > channels:
        raise KernelValueError(f"x has {x.shape[1]} channels, the scales {channels}")
    count = x.shape[0] if rows is None else rows.shape[0]
    check_shape("out", out, count, channels)
    check_device(x.device, out=out, rows=rows, tables=tables)
    picked = x.float() if rows is None else x.float()[rows.long()]
    padded = torch.zeros(count, channels, dtype=torch.float32, device=x.device)
    padded[:, : x.shape[1]] = picked
    scale, live = _rows_of(scales, tables, count)
    out.copy_(_hadamard(padded * scale))
    return _clear(out, live)


def rotate_output(
    y: torch.Tensor,
    scales: torch.Tensor,
    *,
    tables: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = H128(y[i]) * scales[tables[i]] + bias[tables[i]]; see `trellis_kernels.ops.rotate_output`."""
    check_dtype("y", y, torch.float32)
    check_dtype("out", out, torch.float32)
    channels = _check_scales(scales, y.device)
    check_shape("y", y, None, channels)
    check_shape("out", out, y.shape[0], channels)
    check_device(y.device, out=out, tables=tables, bias=bias)
    scale, live = _rows_of(scales, tables, y.shape[0])
    result = _hadamard(y) * scale
    if bias is not None:
        check_dtype("bias", bias, torch.float16)
        check_shape("bias", bias, None, channels)
        addend, live_bias = _rows_of(bias, tables, y.shape[0])
        result = result + addend
        live = live_bias if live is None else live & live_bias if live_bias is not None else live
    out.copy_(result)
    return _clear(out, live)


def _check_scales(scales: torch.Tensor, device: torch.device) -> int:
    check_dtype("scales", scales, torch.float16)
    check_shape("scales", scales, None, None)
    check_device(device, scales=scales)
    channels = scales.shape[1]
    if channels % HADAMARD_BLOCK:
        raise KernelValueError(f"scales have {channels} channels, not a multiple of {HADAMARD_BLOCK}")
    return channels


def _rows_of(scales: torch.Tensor, tables: torch.Tensor | None, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scale row of each output row in float32, and which rows have one (None: all)."""
    if tables is None:
        return scales[:1].float(), None
    check_dtype("tables", tables, *_INTEGERS)
    check_shape("tables", tables, count)
    index = tables.long()
    if scales.shape[0] == 1:
        return scales.float(), index >= 0
    live = (index >= 0) & (index < scales.shape[0])
    return scales[index.clamp(0, scales.shape[0] - 1)].float(), live


def _clear(out: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    if live is not None:
        out.masked_fill_(~live[:, None], 0.0)
    return out


def _hadamard(values: torch.Tensor) -> torch.Tensor:
    """Butterflies over blocks of 128 in float32, normalised at the end."""
    result = values.reshape(-1, HADAMARD_BLOCK)
    half = 1
    while half < HADAMARD_BLOCK:
        pairs = result.view(-1, HADAMARD_BLOCK // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        result = torch.stack((low + high, low - high), dim=2)
        half *= 2
    return result.reshape(values.shape) * (1.0 / math.sqrt(HADAMARD_BLOCK))
