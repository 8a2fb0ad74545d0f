"""Owns the arithmetic of one linear outside the experts: rotate x in, multiply by its codes, rotate the sums out.

    y = H((H(x * suh) in float16) @ W) * svh + bias

It must not know where the codes came from.  On a GPU, few rows take kernels of their own, which decode each tile into
registers and multiply there.  Otherwise codes are decoded a panel of input channels at a time, so that no more than a
bounded part of the linear exists decoded, and panels are added in one fixed order.  Rows are cut likewise, so that
temporaries are bounded for any number of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import torch

from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.extent import BLOCK
from trellis_format.rates import TILE
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.cpu.gemm import split_exactly
from trellis_kernels.cute.keys import DecodeKey, KernelKey
from trellis_kernels.cute.linear_key import MOST_ROWS
from trellis_kernels.cute.op_keys import RotateKey
from trellis_kernels.errors import KernelValueError
from trellis_kernels.layers import device_limits
from trellis_kernels.ops import decode, rotate_input, rotate_output
from trellis_prep import PreparedLinear

__all__ = ["PANEL_BYTES", "SUM_BYTES", "linear", "linear_keys", "panel_channels", "precompile_linears"]

PANEL_BYTES = 32 << 20
"""Most bytes of decoded weights at a time, where one Hadamard block of input channels fits; within a GPU's L2 cache."""
SUM_BYTES = 256 << 20
"""Most bytes of sums at a time, where 128 rows fit."""
_ROW_STEP = 128
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ALIGNMENT = 16  # bytes, of x and out in the few-row kernels


def panel_channels(k: int, n: int, panel_bytes: int = PANEL_BYTES) -> int:
    """Input channels that are decoded at a time: whole blocks of 128, at least one."""
    return min(k, max(panel_bytes // (2 * n) // BLOCK, 1) * BLOCK)


def linear(
    x: torch.Tensor,
    weight: PreparedLinear,
    *,
    out: torch.Tensor,
    panel_bytes: int = PANEL_BYTES,
) -> torch.Tensor:
    """Apply a linear.

    The rotated input is rounded to float16 once; products and sums are float32 on a GPU and exact on a CPU; the output
    is rounded once.  Up to `MOST_ROWS` rows on a GPU, and any on a CPU, a row's bits depend on its own input alone;
    more rows on a GPU are multiplied by torch's library, which may order sums by their number.  On a GPU it launches
    and allocates from torch's caching allocator, and neither synchronises nor copies to the host, so that a CUDA graph
    can hold it.

    Args:
        x: `[rows, channels]`, float16, bfloat16 or float32; channels beyond its width are zeros.
        weight: the linear, on x's device.
        out: `[rows, n]` of stored output channels, float16, bfloat16 or float32, written whole.
        panel_bytes: most bytes of decoded weights at a time.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong.
        ColdKernelError: if a CUDA graph is captured before a launch outside one compiled the kernels.
    """
    check_dtype("x", x, *_FLOATS)
    check_dtype("out", out, *_FLOATS)
    check_shape("x", x, None, None)
    check_shape("out", out, x.shape[0], weight.n)
    check_device(x.device, out=out, codes=weight.codes)
    if x.shape[1] > weight.k:
        raise KernelValueError(f"x has {x.shape[1]} channels, the linear {weight.k}")
    if _takes_few(x, weight, out):
        module = importlib.import_module("trellis_kernels.cute.linear_few")
        result: torch.Tensor = module.linear_few(x, weight, out=out)
        return result
    step = panel_channels(weight.k, weight.n, panel_bytes)
    rows = max(SUM_BYTES // (4 * weight.n) // _ROW_STEP, 1) * _ROW_STEP
    for first in range(0, x.shape[0], rows):
        _rows(x[first : first + rows], weight, step, out[first : first + rows])
    return out


def linear_keys(weight: PreparedLinear, dtype: torch.dtype) -> tuple[KernelKey, ...]:
    """Every kernel that `linear` may launch for a linear and activations of a dtype, in and out; none on a CPU.

    Raises:
        KernelTypeError: if the dtype is not one of activations.
    """
    check_dtype("activations", torch.empty(0, dtype=dtype), *_FLOATS)
    limits = device_limits(weight.device)
    if limits is None:
        return ()
    name, arch = _NAMES[dtype], limits.arch
    keys: list[KernelKey] = []
    if weight.codebook in EXL3_CODEBOOKS:
        module = importlib.import_module("trellis_kernels.cute.linear_few")
        keys.append(module.linear_key(weight, dtype, dtype))
    keys.append(DecodeKey(arch, weight.codebook, weight.rate.half_bits, "float16"))
    for rows in (1, 4):
        keys.append(RotateKey(arch, "input", BLOCK, name, "float16", wide=True, rows_at_once=rows))
        keys.append(RotateKey(arch, "output", BLOCK, "float32", name, wide=True, rows_at_once=rows))
    return tuple(keys)


def precompile_linears(weights: Iterable[PreparedLinear], dtype: torch.dtype, *, jobs: int = 1) -> None:
    """Compile the kernels of linears and load them, so that a launch has nothing left to do.

    Args:
        weights: on one device.
        dtype: of activations.
        jobs: processes that compile; more than one needs the persistent cache, and a main module that may be imported.

    Raises:
        KernelUnsupportedError: if nvidia-cutlass-dsl is not installed.
    """
    keys = dict.fromkeys(key for weight in weights for key in linear_keys(weight, dtype))
    if keys:
        importlib.import_module("trellis_kernels.cute.compiler").precompile(keys, jobs=jobs)


def _takes_few(x: torch.Tensor, weight: PreparedLinear, out: torch.Tensor) -> bool:
    """Whether the few-row kernels run it: few rows, of as many channels as are stored, where they start at 16 bytes."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MOST_ROWS
        and x.shape[1] == weight.k
        and weight.codebook in EXL3_CODEBOOKS
        and x.is_contiguous()
        and out.is_contiguous()
        and not x.data_ptr() % _ALIGNMENT
        and not out.data_ptr() % _ALIGNMENT
    )


def _rows(x: torch.Tensor, weight: PreparedLinear, step: int, out: torch.Tensor) -> None:
    rotated = torch.empty(x.shape[0], weight.k, dtype=torch.float16, device=x.device)
    rotate_input(x, weight.input_scale, out=rotated)
    rotate_output(_multiply(rotated, weight, step), weight.output_scale, bias=weight.bias, out=out)


def _multiply(a: torch.Tensor, weight: PreparedLinear, step: int) -> torch.Tensor:
    """`[rows, n] float32`, a @ W over panels of `step` input channels."""
    panel = torch.empty(step, weight.n, dtype=torch.float16, device=a.device)
    sums: torch.Tensor | None = None
    for first in range(0, weight.k, step):
        end = min(first + step, weight.k)
        part = decode(
            weight.codes[first // TILE : end // TILE],
            codebook=weight.codebook,
            rate=weight.rate,
            out=panel[: end - first],
        )
        sums = _add_product(sums, a[:, first:end], part)
    assert sums is not None  # a linear has at least one block of input channels
    return sums.float()


def _add_product(sums: torch.Tensor | None, a: torch.Tensor, panel: torch.Tensor) -> torch.Tensor:
    """The sums and a @ panel: in float32 on a GPU, in the exact float64 of the torch grouped GEMM elsewhere."""
    if a.is_cuda:
        if sums is None:
            return torch.mm(a, panel, out_dtype=torch.float32)
        return torch.addmm(sums, a, panel, out_dtype=torch.float32)
    matrix = panel.double()
    coarse, fine = split_exactly(a.double())
    product = coarse @ matrix + fine @ matrix
    return product if sums is None else sums + product
