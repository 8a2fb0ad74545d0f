"""Owns the rotation kernel and its launches: scale then Hadamard, or Hadamard then scale and bias, over rows.

It must not know codes or experts beyond the row of a table.

A lane holds eight neighbouring channels, and sixteen or thirty-two neighbouring lanes a block.  Butterflies between
channels of a lane are additions; those between lanes are one shuffle and one fused multiply-add by plus or minus one,
which rounds as the addition does.  So a value is added in the order of the torch backend, nearest channels first, and
has its bits; data is read once and written once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.arguments import check_rotate_input, check_rotate_output
from trellis_kernels.cute import values
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.launch import DTYPE_NAMES, check_cuda, check_rows, index_bytes, is_wide
from trellis_kernels.cute.launches import launch
from trellis_kernels.cute.op_keys import RotateKey
from trellis_kernels.cute.window import LANES

__all__ = ["build", "rotate_input", "rotate_output"]

_WARPS = 4
_LANE_CHANNELS = LANES * values.CHUNK  # channels that a warp holds in one chunk a lane
_MANY_ROWS = 512  # from here on rows alone fill the device, and a warp takes four at once


class RotateArguments(NamedTuple):
    """Arguments of a launch; `rows` and `tables` are index vectors of values of so many bytes, 0 for none."""

    x: Int64
    scales: Int64
    bias: Int64
    rows: Int64
    tables: Int64
    out: Int64
    rows_in: Int32
    width: Int32
    pitch: Int32
    scale_rows: Int32
    scale_pitch: Int32
    bias_rows: Int32
    bias_pitch: Int32
    rows_out: Int32
    channels: Int32
    rows_bytes: Int32
    tables_bytes: Int32


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _hadamard(chunks: list[list[Float32]], lane: Int32, block: int) -> list[list[Float32]]:
    """Rotate one row's channels: chunk c of lane L holds channels 256 c + 8 L to 256 c + 8 L + 7."""
    for half in (1, 2, 4):
        chunks = [_pairs(chunk, half) for chunk in chunks]
    distance = 1
    while distance * values.CHUNK < min(block, _LANE_CHANNELS):
        sign = values.as_float(1 - 2 * ((lane // distance) & 1))  # the upper lane subtracts its own from the lower's
        chunks = [[values.fused(value, sign, values.exchange(value, distance)) for value in chunk] for chunk in chunks]
        distance *= 2
    if block > _LANE_CHANNELS:
        low, high = chunks
        chunks = [
            [values.add(*pair) for pair in zip(low, high, strict=True)],
            [values.subtract(*pair) for pair in zip(low, high, strict=True)],
        ]
    norm = Float32(1.0 / math.sqrt(block))
    return [[values.multiply(value, norm) for value in chunk] for chunk in chunks]


def _pairs(chunk: list[Float32], half: int) -> list[Float32]:
    """Butterflies between channels of a lane that differ in the bit `half`."""
    return [
        values.subtract(chunk[index - half], value) if index & half else values.add(value, chunk[index + half])
        for index, value in enumerate(chunk)
    ]


def _load_row(g_row: Int64, column: Int32, width: Int32, dtype: str, wide: bool) -> list[Float32]:
    """A chunk of a row from `column` on; channels beyond the width are zeros."""
    value_bytes = VALUE_BYTES[dtype]
    if wide:
        inside = cutlass.min(column, width - values.CHUNK)
        return values.load_chunk(g_row + Int64(inside * value_bytes), dtype, Boolean(column < width))
    return [
        values.load_value(
            g_row + Int64(cutlass.min(column + index, width - 1) * value_bytes), dtype, Boolean(column + index < width)
        )
        for index in range(values.CHUNK)
    ]


def _load_scales(g_row: Int64, column: Int32, channels: Int32) -> list[Float32]:
    return values.load_chunk(g_row + Int64(cutlass.min(column, channels - values.CHUNK) * 2), "float16")


def _row_of(index: Int32, count: Int32) -> tuple[Int64, Boolean]:
    """A row that may be read, and whether it is the one that was asked for."""
    row = cutlass.max(cutlass.min(index, count - 1), 0)
    return Int64(row), row == index


def _table_row(index: Int32, count: Int32) -> tuple[Int64, Boolean]:
    """As `_row_of`; a table of one row serves every index that is not negative."""
    row, known = _row_of(index, count)
    return row, known | ((index >= 0) & (count == 1))


@cute.kernel
def _rotate_kernel(key: Constexpr, args: RotateArguments):
    thread, _, _ = cute.arch.thread_idx()
    first_row, group, _ = cute.arch.block_idx()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    chunk_count = max(key.block // _LANE_CHANNELS, 1)
    span = (group * _WARPS + warp) * (chunk_count * _LANE_CHANNELS)
    if span < args.channels:
        columns = [span + lane * values.CHUNK + _LANE_CHANNELS * chunk for chunk in range(chunk_count)]
        places = [first_row * key.rows_at_once + index for index in range(key.rows_at_once)]
        held, known_rows, table_indices = [], [], []
        for index in cutlass.range_constexpr(key.rows_at_once):
            place = cutlass.min(places[index], args.rows_out - 1)
            row, known = _row_of(values.load_index(args.rows, place, args.rows_bytes, place), args.rows_in)
            g_row = args.x + row * Int64(args.pitch * VALUE_BYTES[key.in_dtype])
            held.append([_load_row(g_row, column, args.width, key.in_dtype, key.wide) for column in columns])
            known_rows.append(known)
            table_indices.append(values.load_index(args.tables, place, args.tables_bytes, Int32(0)))
        for index in cutlass.range_constexpr(key.rows_at_once):
            table, known_table = _table_row(table_indices[index], args.scale_rows)
            live = known_rows[index] & known_table
            g_scales = args.scales + table * Int64(args.scale_pitch * 2)
            scale = [_load_scales(g_scales, column, args.channels) for column in columns]
            chunks = held[index]
            if cutlass.const_expr(key.side == "input"):
                chunks = [_times(chunk, factors) for chunk, factors in zip(chunks, scale, strict=True)]
                chunks = _hadamard(chunks, lane, key.block)
            else:
                chunks = _hadamard(chunks, lane, key.block)
                chunks = [_times(chunk, factors) for chunk, factors in zip(chunks, scale, strict=True)]
                flat = cute.make_rmem_tensor(cute.make_layout(chunk_count * values.CHUNK), Float32)
                for at, value in enumerate(value for chunk in chunks for value in chunk):
                    flat[at] = value
                if args.bias_rows > 0:
                    bias_row, known_bias = _table_row(table_indices[index], args.bias_rows)
                    live = live & known_bias
                    g_bias = args.bias + bias_row * Int64(args.bias_pitch * 2)
                    addends = [value for column in columns for value in _load_scales(g_bias, column, args.channels)]
                    for at in cutlass.range_constexpr(chunk_count * values.CHUNK):
                        flat[at] = values.add(flat[at], addends[at])
                chunks = [
                    [flat[values.CHUNK * chunk + at] for at in range(values.CHUNK)] for chunk in range(chunk_count)
                ]
            g_out = args.out + Int64(places[index]) * Int64(args.channels * VALUE_BYTES[key.out_dtype])
            for chunk in cutlass.range_constexpr(chunk_count):
                inside = (columns[chunk] < args.channels) & (places[index] < args.rows_out)
                values.store_chunk(
                    g_out + Int64(columns[chunk] * VALUE_BYTES[key.out_dtype]),
                    chunks[chunk],
                    key.out_dtype,
                    inside,
                    live,
                )


def _times(chunk: list[Float32], factors: list[Float32]) -> list[Float32]:
    return [values.multiply(value, factor) for value, factor in zip(chunk, factors, strict=True)]


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _host(args: RotateArguments, key: Constexpr, stream: cuda.CUstream):
    span = _WARPS * max(key.block, _LANE_CHANNELS)
    rows = (args.rows_out + key.rows_at_once - 1) // key.rows_at_once
    _rotate_kernel(key, args).launch(
        grid=[rows, (args.channels + span - 1) // span, 1], block=[_WARPS * LANES, 1, 1], stream=stream
    )


def build(key: RotateKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `RotateArguments` and a stream.
    """
    return cute.compile(_host, blank(RotateArguments), key, cuda.CUstream(0), options=options)


def rotate_input(
    x: torch.Tensor,
    scales: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    tables: torch.Tensor | None = None,
    block: int = HADAMARD_BLOCK,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = H(x[rows[i]] * scales[tables[i]]); see `trellis_kernels.ops.rotate_input`.

    Bits are those of the torch backend.  `x` and `scales` may have any distance between rows.

    Raises:
        KernelTypeError, KernelValueError: as the op; also if rows are not contiguous, or scales or out not aligned to
            16 bytes.
        KernelUnsupportedError, ColdKernelError: as every kernel.
    """
    check_cuda("x", x)
    check_rotate_input(x, scales, rows, tables, block, out)
    if x.numel() == 0:
        return out.zero_()
    return _launch("input", x, scales, rows, tables, None, block, out)


def rotate_output(
    y: torch.Tensor,
    scales: torch.Tensor,
    *,
    tables: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    block: int = HADAMARD_BLOCK,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = H(y[i]) * scales[tables[i]] + bias[tables[i]]; see `trellis_kernels.ops.rotate_output`.

    Bits are those of the torch backend.  `y`, `scales` and `bias` may have any distance between rows.

    Raises:
        KernelTypeError, KernelValueError: as the op; also if rows are not contiguous, or scales, bias or out not
            aligned to 16 bytes.
        KernelUnsupportedError, ColdKernelError: as every kernel.
    """
    check_cuda("y", y)
    check_rotate_output(y, scales, tables, bias, block, out)
    return _launch("output", y, scales, None, tables, bias, block, out)


def _launch(
    side: str,
    x: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor | None,
    tables: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: int,
    out: torch.Tensor,
) -> torch.Tensor:
    if out.numel() == 0:
        return out
    rows_out, channels = out.shape
    wide = is_wide(x)
    check_rows(aligned=False, x=x)
    check_rows(aligned=True, scales=scales, bias=bias)
    check_rows(aligned=True, contiguous=True, out=out)
    key = RotateKey(
        arch=arch_of_device(out.device.index).name,
        side=side,
        block=block,
        in_dtype=DTYPE_NAMES[x.dtype],
        out_dtype=DTYPE_NAMES[out.dtype],
        wide=wide,
        rows_at_once=4 if wide and block == HADAMARD_BLOCK and rows_out >= _MANY_ROWS else 1,
    )
    rows_address, rows_bytes = index_bytes("rows", rows)
    tables_address, tables_bytes = index_bytes("tables", tables)
    launch(
        key,
        out.device,
        RotateArguments,
        x=x,
        scales=scales,
        bias=bias,
        rows=rows_address,
        tables=tables_address,
        out=out,
        rows_in=x.shape[0],
        width=x.shape[1],
        pitch=x.stride(0),
        scale_rows=scales.shape[0],
        scale_pitch=scales.stride(0),
        bias_rows=0 if bias is None else bias.shape[0],
        bias_pitch=0 if bias is None else bias.stride(0),
        rows_out=rows_out,
        channels=channels,
        rows_bytes=rows_bytes,
        tables_bytes=tables_bytes,
    )
    return out
