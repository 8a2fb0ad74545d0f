"""Owns the signature of every op and the choice of its backend.  It must not know checkpoints or plans.

Two backends share each signature: `cpu`, torch code that runs on any device and is written to be read, and `cute`,
CuTe DSL kernels for CUDA devices.  A backend is a module with functions of the same names and arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from trellis_format.activations import Activation
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.rates import Rate
from trellis_kernels.bank import CodeBank
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError
from trellis_kernels.routes import PackedRoutes

__all__ = [
    "BACKENDS",
    "OPS",
    "activate",
    "backend_for",
    "decode",
    "grouped_gemm",
    "implementation",
    "pack_routes",
    "reduce_routes",
    "rotate_input",
    "rotate_output",
]

_CPU = "trellis_kernels.cpu"
_CUTE = "trellis_kernels.cute"
_IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "decode": {"cpu": f"{_CPU}.decode", "cute": f"{_CUTE}.decode"},
    "rotate_input": {"cpu": f"{_CPU}.rotate", "cute": f"{_CUTE}.rotate"},
    "rotate_output": {"cpu": f"{_CPU}.rotate", "cute": f"{_CUTE}.rotate"},
    "activate": {"cpu": f"{_CPU}.activate", "cute": f"{_CUTE}.activate"},
    "pack_routes": {"cpu": f"{_CPU}.routes", "cute": f"{_CUTE}.route_pack"},
    "grouped_gemm": {"cpu": f"{_CPU}.gemm"},
    "reduce_routes": {"cpu": f"{_CPU}.reduce", "cute": f"{_CUTE}.reduce"},
}

BACKENDS = ("cpu", "cute")
"""Every backend by name."""
OPS = tuple(_IMPLEMENTATIONS)
"""Every op by name."""


def backend_for(op: str, device: torch.device) -> str:
    """The backend that an op takes on a device when none is asked for: `cute` on CUDA where it has one, else `cpu`.

    Raises:
        KernelValueError: if the op is unknown.
    """
    modules = _modules(op)
    return "cute" if device.type == "cuda" and "cute" in modules else "cpu"


def implementation(op: str, backend: str) -> Callable[..., Any]:
    """The function of an op in a backend, imported on first use.

    Raises:
        KernelValueError: if the op or the backend is unknown.
        KernelUnsupportedError: if the backend does not have the op.
    """
    modules = _modules(op)
    if backend not in BACKENDS:
        raise KernelValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend not in modules:
        raise KernelUnsupportedError(f"op {op} has no {backend} backend; it has: {', '.join(modules)}")
    function: Callable[..., Any] = getattr(importlib.import_module(modules[backend]), op)
    return function


def _modules(op: str) -> dict[str, str]:
    try:
        return _IMPLEMENTATIONS[op]
    except KeyError:
        raise KernelValueError(f"unknown op {op!r}; known: {', '.join(OPS)}") from None


def _call(op: str, backend: str | None, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    return implementation(op, backend or backend_for(op, device))(*args, **kwargs)


def decode(
    codes: torch.Tensor,
    *,
    codebook: str,
    rate: Rate,
    table: str = "auto",
    out: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """Decode tiles to the weight in the rotated basis, exactly (one more rounding to bfloat16).

    Args:
        codes: `[..., k_tiles, n_tiles, 16*K] int16`, contiguous.
        codebook: its name.
        rate: K.
        table: form of the codebook's table, where it has one: `compact`, `full` (64 KiB of shared memory, for lut_e4m3
            at K = 2 alone), or `auto`, which takes compact.  Bits are the same.
        out: `[..., k, n]` float16, bfloat16 or float32, written whole.
        backend: `cpu`, `cute`, or None for the device's own.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong.
        FormatValueError: if the codebook is unknown or K not legal for it.
    """
    result: torch.Tensor = _call(
        "decode", backend, codes.device, codes, codebook=codebook, rate=rate, table=table, out=out
    )
    return result


def rotate_input(
    x: torch.Tensor,
    scales: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    tables: torch.Tensor | None = None,
    block: int = HADAMARD_BLOCK,
    out: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """out[i] = H(x[rows[i]] * scales[tables[i]]), in float32, rounded once to `out`'s dtype.

    Args:
        x: `[rows_in, channels]`, float16, bfloat16 or float32; channels beyond its width are zeros.
        scales: `[scale_rows, channels] float16`, the input vectors (suh) or signs; channels a multiple of `block`.
        rows: `[rows_out] int32 or int64`, row of x of each output row; None is the identity.  An index outside x gives
            a row of zeros.
        tables: `[rows_out] int32 or int64`, scale row of each output row; None is row 0.  An index outside the table
            gives a row of zeros.  A table of one row serves every index that is not negative.
        block: channels of a Hadamard block, 128 or 512.
        out: `[rows_out, channels]`, float16 or float32, written whole; may be `x` where `rows` is None and both are
            float32.
        backend: see `decode`.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong.
    """
    result: torch.Tensor = _call(
        "rotate_input", backend, x.device, x, scales, rows=rows, tables=tables, block=block, out=out
    )
    return result


def rotate_output(
    y: torch.Tensor,
    scales: torch.Tensor,
    *,
    tables: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    block: int = HADAMARD_BLOCK,
    out: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """out[i] = H(y[i]) * scales[tables[i]] + bias[tables[i]], in float32, rounded once to `out`'s dtype.

    Args:
        y: `[rows, channels]`, float16, bfloat16 or float32.
        scales: `[scale_rows, channels] float16`, the output vectors (svh) or signs; channels a multiple of `block`.
        tables: `[rows] int32 or int64`, scale row of each row, None is row 0.  An index outside the table gives a row
            of zeros.  A table of one row serves every index that is not negative.
        bias: `[experts, channels] float16` or None, indexed by `tables`.
        block: channels of a Hadamard block, 128 or 512.
        out: `[rows, channels]`, float16, bfloat16 or float32, written whole; may be `y`.
        backend: see `decode`.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong.
    """
    result: torch.Tensor = _call(
        "rotate_output", backend, y.device, y, scales, tables=tables, bias=bias, block=block, out=out
    )
    return result


def activate(
    gate: torch.Tensor | None,
    up: torch.Tensor,
    *,
    activation: Activation,
    out: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """Join gate and up by the activation, in float32.

    Args:
        gate: `[rows, channels] float32`, None for a law without a gate.
        up: `[rows, channels] float32`.
        activation: the law.
        out: `[rows, channels] float32`, written whole; may be `up`.
        backend: see `decode`.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong, or the gate does not fit the law.
    """
    result: torch.Tensor = _call("activate", backend, up.device, gate, up, activation=activation, out=out)
    return result


def pack_routes(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_rows: int,
    expert_map: torch.Tensor | None = None,
    stable: bool = True,
    out: PackedRoutes | None = None,
    backend: str | None = None,
) -> PackedRoutes:
    """Order routes by expert, each segment padded to whole blocks.

    Args:
        topk_ids: `[tokens, top_k] int32 or int64`; an id outside [0, experts) is no expert and its route is dropped.
        num_experts: experts that the rank holds.
        block_rows: rows of a block, one of `BLOCK_ROWS`.
        expert_map: `[global experts] int32 or int64`, local expert of each global id, -1 for none; None is the
            identity.
        stable: whether routes of an expert ascend; otherwise their order may differ between runs.
        out: an arena to write, of at least `route_capacity` slots for these routes; None makes one of just so many.
        backend: see `decode`.

    Returns:
        The packed routes, every slot and block of the arena written.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or number is wrong, or the arena does not fit.
    """
    result: PackedRoutes = _call(
        "pack_routes",
        backend,
        topk_ids.device,
        topk_ids,
        num_experts=num_experts,
        block_rows=block_rows,
        expert_map=expert_map,
        stable=stable,
        out=out,
    )
    return result


def grouped_gemm(
    a: torch.Tensor, bank: CodeBank, routes: PackedRoutes, *, out: torch.Tensor, backend: str | None = None
) -> torch.Tensor:
    """out[r] = a[r] @ W[expert of r] for every packed route r, with exact code values and float32 results.

    A row's bits depend on its own input and expert alone, not on its place among the routes.

    Args:
        a: `[routes, k] float16`, by flat route.
        bank: the codes of one projection.
        routes: packed routes.
        out: `[routes, n] float32`; rows of dropped routes are zeros, the others written whole.
        backend: see `decode`.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong.
    """
    result: torch.Tensor = _call("grouped_gemm", backend, a.device, a, bank, routes, out=out)
    return result


def reduce_routes(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    factor: float = 1.0,
    accumulator: torch.Tensor | None = None,
    out: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """out[t] = factor * sum over slots s of topk_weights[t, s] * rows[t, s], in float32.

    Slots are added in order, so that bits repeat.  With an accumulator each term is rounded to the output's dtype and
    added atomically, in any order, so that bits may differ between runs.

    Args:
        rows: `[tokens * top_k, padded channels] float32`, by flat route; rows of dropped routes are zeros.
        topk_weights: `[tokens, top_k]`, float16, bfloat16 or float32.
        factor: multiplies every route weight.
        accumulator: `[capacity, padded channels] float32` to choose the atomic sum, at least as many rows as tokens;
            its first rows are overwritten.  None chooses the ordered sum.
        out: `[tokens, channels]`, float32, float16 or bfloat16, an atomic sum's float16 or bfloat16; the first
            channels of the rows, written whole.
        backend: see `decode`.

    Returns:
        `out`.

    Raises:
        KernelTypeError, KernelValueError: if a dtype, shape or device is wrong.
    """
    result: torch.Tensor = _call(
        "reduce_routes",
        backend,
        rows.device,
        rows,
        topk_weights,
        factor=factor,
        accumulator=accumulator,
        out=out,
    )
    return result
