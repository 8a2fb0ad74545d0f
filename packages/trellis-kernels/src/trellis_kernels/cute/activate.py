"""Owns the activation kernel and its launch.  It must not know rotations.

The laws are those of `trellis_format.activations`, in float32, joined by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.activations import SITU_GATE_LIMIT, SITU_UP_LIMIT, Activation
from trellis_kernels.arguments import check_activate
from trellis_kernels.cute import values
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.launch import check_cuda, check_flat
from trellis_kernels.cute.launches import launch
from trellis_kernels.cute.op_keys import ActivateKey

__all__ = ["Constants", "activate", "activation_law", "build"]

_THREADS = 256
_GELU_SLOPE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


class Constants(NamedTuple):
    """The constants of an activation, in registers."""

    limit: Float32
    alpha: Float32
    beta: Float32


Law = Callable[[Float32, Float32, Constants], Float32]


def _sigmoid(value: Float32) -> Float32:
    return values.divide(Float32(1.0), values.add(Float32(1.0), cute.math.exp(values.subtract(Float32(0.0), value))))


def _bounded(gate: Float32, up: Float32, limit: Float32) -> tuple[Float32, Float32]:
    below = values.subtract(Float32(0.0), limit)
    return values.minimum(gate, limit), values.maximum(values.minimum(up, limit), below)


def _silu(gate: Float32, up: Float32, constants: Constants) -> Float32:
    gate, up = _bounded(gate, up, constants.limit)
    return values.multiply(values.multiply(gate, _sigmoid(gate)), up)


def _gelu_tanh(gate: Float32, up: Float32, constants: Constants) -> Float32:
    gate, up = _bounded(gate, up, constants.limit)
    cube = values.multiply(values.multiply(gate, gate), gate)
    inner = values.multiply(values.fused(cube, Float32(_GELU_CUBIC), gate), Float32(2.0 * _GELU_SLOPE))
    # (1 + tanh z) / 2 = sigmoid 2z, which loses nothing where the tanh is near -1
    return values.multiply(values.multiply(gate, _sigmoid(inner)), up)


def _situ(gate: Float32, up: Float32, _constants: Constants) -> Float32:
    soft = [
        values.multiply(cute.math.tanh(values.multiply(value, Float32(1.0 / bound))), Float32(bound))
        for value, bound in ((gate, SITU_GATE_LIMIT), (up, SITU_UP_LIMIT))
    ]
    return values.multiply(values.multiply(soft[0], _sigmoid(gate)), soft[1])


def _swigluoai(gate: Float32, up: Float32, constants: Constants) -> Float32:
    gate, up = _bounded(gate, up, constants.limit)
    return values.multiply(
        values.multiply(gate, _sigmoid(values.multiply(gate, constants.alpha))), values.add(up, constants.beta)
    )


def _relu2(_gate: Float32, up: Float32, _constants: Constants) -> Float32:
    positive = values.maximum(up, Float32(0.0))
    return values.multiply(positive, positive)


_LAWS: dict[str, Law] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "situ": _situ,
    "swigluoai": _swigluoai,
    "relu2": _relu2,
}


def activation_law(kind: str) -> Law:
    """The device side of an activation: `(gate, up, constants)` to the result, all float32 registers."""
    return _LAWS[kind]


class ActivateArguments(NamedTuple):
    """Arguments of a launch; `count` values."""

    gate: Int64
    up: Int64
    out: Int64
    count: Int32
    limit: Float32
    alpha: Float32
    beta: Float32


@cute.kernel
def _activate_kernel(key: Constexpr, args: ActivateArguments):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    first = (block * _THREADS + thread) * values.CHUNK
    law = activation_law(key.kind)
    constants = Constants(args.limit, args.alpha, args.beta)
    if first + values.CHUNK <= args.count:
        r_up = values.load_chunk(args.up + Int64(first) * 4, "float32")
        r_gate = r_up
        if cutlass.const_expr(key.kind != "relu2"):
            r_gate = values.load_chunk(args.gate + Int64(first) * 4, "float32")
        results = [law(g, u, constants) for g, u in zip(r_gate, r_up, strict=True)]
        values.store_chunk(args.out + Int64(first) * 4, results, "float32", None)
    elif first < args.count:
        for index in cutlass.range(first, args.count, unroll=1):
            one_up = values.load_value(args.up + Int64(index) * 4, "float32")
            one_gate = one_up
            if cutlass.const_expr(key.kind != "relu2"):
                one_gate = values.load_value(args.gate + Int64(index) * 4, "float32")
            result = law(one_gate, one_up, constants)
            values.store_value(args.out + Int64(index) * 4, result, "float32", None)


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _host(args: ActivateArguments, key: Constexpr, stream: cuda.CUstream):
    per_block = _THREADS * values.CHUNK
    _activate_kernel(key, args).launch(
        grid=[(args.count + per_block - 1) // per_block, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


def build(key: ActivateKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `ActivateArguments` and a stream.
    """
    return cute.compile(_host, blank(ActivateArguments), key, cuda.CUstream(0), options=options)


def activate(gate: torch.Tensor | None, up: torch.Tensor, *, activation: Activation, out: torch.Tensor) -> torch.Tensor:
    """Join gate and up; see `trellis_kernels.ops.activate`.

    Raises:
        KernelTypeError, KernelValueError: as the op; also if a tensor is not contiguous, not aligned to 16 bytes, or
            of 2^31 - 2048 values or more.
        KernelUnsupportedError, ColdKernelError: as every kernel.
    """
    check_cuda("up", up)
    check_activate(gate, up, activation, out)
    check_flat(gate=gate, up=up, out=out)
    if out.numel() == 0:
        return out
    key = ActivateKey(arch=arch_of_device(out.device.index).name, kind=activation.kind)
    launch(
        key,
        out.device,
        ActivateArguments,
        gate=gate,
        up=up,
        out=out,
        count=out.numel(),
        limit=activation.limit,
        alpha=activation.alpha,
        beta=activation.beta,
    )
    return out
