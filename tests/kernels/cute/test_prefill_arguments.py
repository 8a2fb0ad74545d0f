"""Holds the arguments of many-token launches to reaching the compiled function each in its own place."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from trellis_format.activations import Activation
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.prefill_key import (
    PrefillImageKey,
    PrefillMmaKey,
    PrefillReduceKey,
    PrefillScheduleKey,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64

from trellis_kernels.cute import compiler
from trellis_kernels.cute.argument_tuples import kinds
from trellis_kernels.cute.prefill_arguments import (
    GemmArguments,
    ImageArguments,
    ScheduleArguments,
    SumArguments,
    tile_tables,
)

STORED = {Int64: ctypes.c_int64, Int32: ctypes.c_int32, Float32: ctypes.c_float}
KERNELS: list[tuple[KernelKey, type[tuple[Any, ...]]]] = [
    (PrefillScheduleKey("sm_90a"), ScheduleArguments),
    (PrefillReduceKey("sm_90a", "float32", "float16"), SumArguments),
    (PrefillImageKey("sm_90a", "float16", 1), ImageArguments),
    (PrefillMmaKey("sm_80", "mul1", (6,)), GemmArguments),
]


@pytest.mark.parametrize(("key", "arguments"), KERNELS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_each_argument_reaches_its_place(key: KernelKey, arguments: type[tuple[Any, ...]]) -> None:
    values: dict[str, int | float] = {}
    for index, (name, kind) in enumerate(kinds(arguments).items()):
        values[name] = index + 0.5 if kind is Float32 else (1 << 40 if kind is Int64 else 0) + 1000 + index
    given = arguments(*(kind(values[name]) for name, kind in kinds(arguments).items()))
    kernel = compiler.compile_kernel(key)
    pointers, owners = kernel.execution_args.generate_execution_args((given, cuda.CUstream(0)), {})
    assert len(pointers) == len(values) + 1  # and the stream
    found = [
        STORED[kind].from_address(pointer if isinstance(pointer, int) else pointer.value).value
        for kind, pointer in zip(kinds(arguments).values(), pointers, strict=False)
    ]
    assert found == list(values.values())
    del owners


def test_tables_of_a_tile_lie_as_its_information() -> None:
    key = PrefillMmaKey("sm_80", "mul1", (6, 6), "join", Activation("silu"), biased=(True, False))
    args = GemmArguments(*range(100, 100 + len(GemmArguments._fields)))
    wanted = [
        (args.first_scales, args.scale_pitch), (args.last_scales, args.scale_pitch),
        (args.input_scales, args.input_scale_pitch),
        (args.first_bias, args.bias_pitch), (args.last_bias, args.bias_pitch),
    ]  # fmt: skip
    assert tile_tables(args, key) == wanted
    assert len(wanted) == key.tables
    assert tile_tables(args, PrefillMmaKey("sm_80", "mul1", (6,), "rows")) == []
