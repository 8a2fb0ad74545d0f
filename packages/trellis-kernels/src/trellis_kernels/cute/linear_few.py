"""Owns the few-row kernels of one linear: its products, then their sum, rotation, scale and bias.

It must not know what the linear is for.  A thread block takes 128 output channels and a share of the input channels: it
starts its codes, rotates its share of every row into shared memory while they come, and multiplies.  The second launch
adds the shares in order, so that bits repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.extent import BLOCK
from trellis_format.rates import Rate
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import moe_math
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.gemm_loop import Loop, accumulate
from trellis_kernels.cute.gemm_share import STRIP_CHANNELS
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.launch import DTYPE_NAMES
from trellis_kernels.cute.launches import launch
from trellis_kernels.cute.linear_key import MOST_ROWS, LinearKey, choose_share
from trellis_kernels.cute.moe_gemm import SUM_PITCH, store_sums
from trellis_kernels.cute.moe_math import LANE_CHANNELS
from trellis_prep import PreparedLinear

__all__ = ["build", "linear_few", "linear_key"]

_STRIPS = BLOCK // STRIP_CHANNELS
_STEPS = 2  # of 64 input channels in a block
_BLOCK_BYTES = 2 * BLOCK
_ROW_SKEW = 16  # bytes between rows in shared memory beyond their own, so that lanes of different rows read other banks
_FINISH_WARPS = 8


class LinearArguments(NamedTuple):
    """Arguments of both kernels; `parts` is `[split, rows, n] float32`, and `bias` 0 for none."""

    x: Int64
    words: Int64
    input_scales: Int64
    output_scales: Int64
    bias: Int64
    parts: Int64
    out: Int64
    rows: Int32
    k: Int32
    split: Int32


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _load_channels(x: Int64, first: Int64, dtype: str) -> list[Float32]:
    """Four values of a row."""
    if dtype == "float32":
        return gpu.load_floats(x + first * 4, LANE_CHANNELS)
    return [value for word in gpu.load_words(x + first * 2, 2) for value in gpu.floats_from(word, dtype)]


def _store_channels(out: Int64, first: Int64, values: list[Float32], dtype: str) -> None:
    if dtype == "float32":
        gpu.store_floats(out + first * 4, values)
    else:
        gpu.store_words(out + first * VALUE_BYTES[dtype], gpu.float_to(values, dtype))


def _threads(key: LinearKey) -> int:
    return 32 * _STRIPS * key.slices


@cute.jit
def _rotate_rows(
    args: LinearArguments,
    first_block: Int32,
    blocks: Int32,
    s_rows: Int32,
    thread: Int32,
    key: Constexpr,
):
    """A share of every row, rotated, `[rows, share] float16` in the order that the product reads."""
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    pitch = key.share_blocks * _BLOCK_BYTES + _ROW_SKEW
    signs = moe_math.hadamard_signs(lane)
    for task in cutlass.range(warp, args.rows * blocks, _threads(key) // 32, unroll=1):
        row = task // blocks
        block = task - row * blocks
        channel = (first_block + block) * BLOCK + lane * LANE_CHANNELS
        values = _load_channels(args.x, Int64(row) * args.k + channel, key.x_dtype)
        suh = moe_math.load_scales(args.input_scales, channel)
        rotated = moe_math.hadamard([a * b for a, b in zip(values, suh, strict=True)], signs)
        s_first = s_rows + row * pitch + block * _BLOCK_BYTES + moe_math.stored_offset(lane)
        for place, word in enumerate(moe_math.stored_words(rotated)):
            gpu.store_shared_words(s_first + 8 * place, [word])
    cute.arch.sync_threads()


@cute.kernel
def _multiply_kernel(key: Constexpr, args: LinearArguments):
    """One thread block: a block of 128 output channels, and a share of the input channels."""
    thread, _, _ = cute.arch.thread_idx()
    column, _, _ = cute.arch.block_idx()
    lane = thread & 31
    warp = cute.arch.make_warp_uniform(thread >> 5)
    warps = _threads(key) // 32
    rate = Rate(key.half_bits)
    pitch = key.share_blocks * _BLOCK_BYTES + _ROW_SKEW
    smem = cutlass.memory.SmemAllocator()
    s_sums = smem.allocate_array(Float32, warps * MOST_ROWS * SUM_PITCH, byte_alignment=16).toint()
    s_rows = smem.allocate_array(Float32, MOST_ROWS * pitch // 4, byte_alignment=16).toint()
    block = column // args.split
    rank = column - block * args.split
    first_block = rank * key.share_blocks
    end_block = cutlass.min(first_block + key.share_blocks, args.k // BLOCK)
    strip = warp % _STRIPS
    g_strip = args.words + Int64(block * _STRIPS + strip) * (STRIP_CHANNELS // 16 * rate.tile_bytes)

    def find_rows(_columns: int) -> Any:
        _rotate_rows(args, first_block, end_block - first_block, s_rows, thread, key)
        row = cutlass.min(lane >> 2, args.rows - 1)
        return [s_rows + row * pitch - first_block * _BLOCK_BYTES + (lane & 3) * 32]

    r_sums = cute.make_rmem_tensor(cute.make_layout((4, 1, 4)), Float32)
    r_sums.fill(0.0)
    loop = Loop(rate, key.codebook, key.n // 16, 1, key.stages, "exact", rows_are_shared=True)
    accumulate(
        r_sums, g_strip, first_block * _STEPS + warp // _STRIPS, end_block * _STEPS, Int32(key.slices), lane, Int32(0),
        find_rows, loop,
    )  # fmt: skip
    s_mine = s_sums + warp * (MOST_ROWS * SUM_PITCH * 4)
    store_sums(r_sums, s_mine, lane, rate, 1, "exact", MOST_ROWS)
    cute.arch.sync_threads()
    for row in cutlass.range(warp, args.rows, warps, unroll=1):
        first = s_sums + ((lane >> 4) * MOST_ROWS + row) * (SUM_PITCH * 4) + (lane & 15) * 16
        total = gpu.load_shared_floats(first, LANE_CHANNELS)
        for index in cutlass.range_constexpr(1, key.slices):
            other = gpu.load_shared_floats(first + index * (_STRIPS * MOST_ROWS * SUM_PITCH * 4), LANE_CHANNELS)
            total = [a + b for a, b in zip(total, other, strict=True)]
        place = (Int64(rank) * args.rows + row) * key.n + block * BLOCK + lane * LANE_CHANNELS
        gpu.store_floats(args.parts + place * 4, total)


@cute.kernel
def _finish_kernel(key: Constexpr, args: LinearArguments):
    """One warp: a block of 128 output channels of one row."""
    thread, _, _ = cute.arch.thread_idx()
    index, _, _ = cute.arch.block_idx()
    lane = thread & 31
    task = index * _FINISH_WARPS + cute.arch.make_warp_uniform(thread >> 5)
    blocks = key.n // BLOCK
    if task < args.rows * blocks:
        row = task // blocks
        channel = (task - row * blocks) * BLOCK + lane * LANE_CHANNELS
        place = Int64(row) * key.n + channel
        r_total = cute.make_rmem_tensor(cute.make_layout((LANE_CHANNELS,)), Float32)
        r_total.fill(0.0)
        for rank in cutlass.range(args.split, unroll=1):
            values = gpu.load_floats(args.parts + (Int64(rank) * args.rows * key.n + place) * 4, LANE_CHANNELS)
            for each in cutlass.range_constexpr(LANE_CHANNELS):
                r_total[each] = r_total[each] + values[each]
        sums = moe_math.hadamard([r_total[each] for each in range(LANE_CHANNELS)], moe_math.hadamard_signs(lane))
        result = [a * b for a, b in zip(sums, moe_math.load_scales(args.output_scales, channel), strict=True)]
        if cutlass.const_expr(key.biased):
            result = [a + b for a, b in zip(result, moe_math.load_scales(args.bias, channel), strict=True)]
        _store_channels(args.out, place, result, key.out_dtype)


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _host(args: LinearArguments, key: Constexpr, stream: cuda.CUstream):
    blocks = key.n // BLOCK
    _multiply_kernel(key, args).launch(grid=[blocks * args.split, 1, 1], block=[_threads(key), 1, 1], stream=stream)
    tasks = args.rows * blocks
    _finish_kernel(key, args).launch(
        grid=[(tasks + _FINISH_WARPS - 1) // _FINISH_WARPS, 1, 1], block=[32 * _FINISH_WARPS, 1, 1], stream=stream
    )


def build(key: LinearKey, options: str) -> Any:
    """Compile the two kernels of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `LinearArguments` and a stream.
    """
    return cute.compile(_host, blank(LinearArguments), key, cuda.CUstream(0), options=options)


def linear_key(weight: PreparedLinear, x_dtype: torch.dtype, out_dtype: torch.dtype) -> LinearKey:
    """The kernels for a linear on its CUDA device.

    Raises:
        KernelUnsupportedError: if its codebook has a table, or no target covers the device.
    """
    index = weight.device.index
    multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
    return LinearKey(
        arch=arch_of_device(index).name,
        codebook=weight.codebook,
        half_bits=weight.rate.half_bits,
        n=weight.n,
        x_dtype=DTYPE_NAMES[x_dtype],
        out_dtype=DTYPE_NAMES[out_dtype],
        biased=weight.bias is not None,
        share_blocks=choose_share(weight.k, weight.n, multiprocessors),
    )


def linear_few(x: torch.Tensor, weight: PreparedLinear, *, out: torch.Tensor) -> torch.Tensor:
    """Apply a linear to few rows; see `trellis_kernels.linear.linear`, which has checked the arguments.

    A row's bits depend on its own input, the linear and the device, not on the rows beside it.

    Args:
        x: `[rows, k]`, 1 to `MOST_ROWS` rows, contiguous, 16-byte aligned.
        weight: on the same CUDA device.
        out: `[rows, n]`, contiguous, 16-byte aligned, written whole.

    Returns:
        `out`.

    Raises:
        KernelUnsupportedError, ColdKernelError: as every kernel.
    """
    key = linear_key(weight, x.dtype, out.dtype)
    rows, split = x.shape[0], key.split(weight.k)
    parts = torch.empty(split * rows * weight.n, dtype=torch.float32, device=x.device)
    launch(
        key,
        x.device,
        LinearArguments,
        x=x,
        words=weight.codes,
        input_scales=weight.input_scale,
        output_scales=weight.output_scale,
        bias=weight.bias,
        parts=parts,
        out=out,
        rows=rows,
        k=weight.k,
        split=split,
    )
    return out
