"""Owns the torch rotations: scale then Hadamard on the way in, Hadamard then scale on the way out.

It must not know experts beyond the row of a table.
"""

from __future__ import annotations

import math

import torch

from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.arguments import check_rotate_input, check_rotate_output

__all__ = ["rotate_input", "rotate_output"]


def rotate_input(
    x: torch.Tensor,
    scales: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    tables: torch.Tensor | None = None,
    block: int = HADAMARD_BLOCK,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = H(x[rows[i]] * scales[tables[i]]); see `trellis_kernels.ops.rotate_input`."""
    check_rotate_input(x, scales, rows, tables, block, out)
    count, channels = out.shape
    picked, live = _pick(x, rows)
    padded = torch.zeros(count, channels, dtype=torch.float32, device=x.device)
    padded[:, : x.shape[1]] = picked
    scale, known = _rows_of(scales, tables)
    out.copy_(_hadamard(padded * scale, block))
    return _clear(out, live, known)


def rotate_output(
    y: torch.Tensor,
    scales: torch.Tensor,
    *,
    tables: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    block: int = HADAMARD_BLOCK,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = H(y[i]) * scales[tables[i]] + bias[tables[i]]; see `trellis_kernels.ops.rotate_output`."""
    check_rotate_output(y, scales, tables, bias, block, out)
    scale, known = _rows_of(scales, tables)
    result = _hadamard(y.float(), block) * scale
    has_bias = None
    if bias is not None:
        addend, has_bias = _rows_of(bias, tables)
        result = result + addend
    out.copy_(result)
    return _clear(out, known, has_bias)


def _pick(x: torch.Tensor, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of x in float32, zeros for an index outside it, and which are inside (None: all)."""
    if rows is None:
        return x.float(), None
    index = rows.long()
    known = (index >= 0) & (index < x.shape[0])
    picked = torch.zeros(index.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    picked[known] = x[index[known]].float()
    return picked, known


def _rows_of(table: torch.Tensor, tables: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The table's row of each output row in float32, and which rows have one (None: all)."""
    if tables is None:
        return table[:1].float(), None
    index = tables.long()
    if table.shape[0] == 1:
        return table.float(), index >= 0
    known = (index >= 0) & (index < table.shape[0])
    return table[index.clamp(0, table.shape[0] - 1)].float(), known


def _clear(out: torch.Tensor, *live: torch.Tensor | None) -> torch.Tensor:
    for rows in live:
        if rows is not None:
            out.masked_fill_(~rows[:, None], 0.0)
    return out


def _hadamard(values: torch.Tensor, block: int) -> torch.Tensor:
    """Butterflies over blocks in float32, the nearest channels first, normalised at the end."""
    result = values.reshape(-1, block)
    half = 1
    while half < block:
        pairs = result.view(-1, block // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        result = torch.stack((low + high, low - high), dim=2)
        half *= 2
    return result.reshape(values.shape) * (1.0 / math.sqrt(block))
