"""Owns float32 values in registers: arithmetic with one rounding an instruction, and values of io dtypes in memory.

It must not know what the values mean.  Every operation rounds to nearest even and is never contracted with another, so
that a kernel can state its result to the last bit.  A chunk is eight consecutive values, which a lane moves at once.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from trellis_kernels.cute.keys import VALUE_BYTES

__all__ = [
    "CHUNK",
    "accumulate",
    "add",
    "as_float",
    "divide",
    "exchange",
    "fused",
    "keep",
    "load_chunk",
    "load_index",
    "load_value",
    "maximum",
    "minimum",
    "multiply",
    "rounded",
    "store_chunk",
    "store_value",
    "subtract",
]

CHUNK = 8
"""Values of a chunk."""

_WORD_VALUES = {"float16": 2, "bfloat16": 2, "float32": 1}


@dsl_user_op
def _float_op(code: str, *operands: Any, loc: Any = None, ip: Any = None) -> Float32:
    """One pure instruction: result `$0`, operands `$1` on, all float32 registers."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(operand).ir_value(loc=loc, ip=ip) for operand in operands],
            code,
            ",".join(["=f"] + ["f"] * len(operands)),
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def _widen_op(code: str, word: Uint32, loc: Any = None, ip: Any = None) -> Float32:
    """One pure instruction sequence from a 32-bit register `$1` to a float32 `$0`."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Uint32(word).ir_value(loc=loc, ip=ip)],
            code,
            "=f,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def _narrow_op(code: str, *operands: Any, loc: Any = None, ip: Any = None) -> Uint32:
    """One pure instruction sequence from float32 `$1` on to a 32-bit register `$0`."""
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [Float32(operand).ir_value(loc=loc, ip=ip) for operand in operands],
            code,
            ",".join(["=r"] + ["f"] * len(operands)),
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def add(first: Float32, second: Float32) -> Float32:
    """`first + second`."""
    return _float_op("add.rn.f32 $0, $1, $2;", first, second)


def subtract(first: Float32, second: Float32) -> Float32:
    """`first - second`."""
    return _float_op("sub.rn.f32 $0, $1, $2;", first, second)


def multiply(first: Float32, second: Float32) -> Float32:
    """`first * second`."""
    return _float_op("mul.rn.f32 $0, $1, $2;", first, second)


def fused(first: Float32, second: Float32, addend: Float32) -> Float32:
    """`first * second + addend` with one rounding."""
    return _float_op("fma.rn.f32 $0, $1, $2, $3;", first, second, addend)


def divide(first: Float32, second: Float32) -> Float32:
    """`first / second`."""
    return _float_op("div.rn.f32 $0, $1, $2;", first, second)


def minimum(first: Float32, second: Float32) -> Float32:
    """The smaller one; NaN if either is."""
    return _float_op("min.NaN.f32 $0, $1, $2;", first, second)


def maximum(first: Float32, second: Float32) -> Float32:
    """The larger one; NaN if either is."""
    return _float_op("max.NaN.f32 $0, $1, $2;", first, second)


def rounded(value: Float32, dtype: str) -> Float32:
    """The value rounded to a dtype and back."""
    return _widen(_narrow([value, value][: _WORD_VALUES[dtype]], dtype)[0], dtype)[0]


def exchange(value: Float32, distance: int) -> Float32:
    """The value of the lane whose index differs in the bit `distance`."""
    return cute.arch.shuffle_sync_bfly(value, distance)


def as_float(number: Int32) -> Float32:
    """A small integer as float32, exact."""
    return Float32(number)


def keep(words: list[Uint32], condition: Boolean) -> list[Uint32]:
    """The words where the condition holds, else zeros."""
    mask = Uint32(0) - Uint32(condition)
    return [word & mask for word in words]


def _load_words(address: Int64, count: int) -> list[Uint32]:
    """1 or 4 words of memory that is read once, past the first cache level."""
    targets = ", ".join(f"{{$w{index}}}" for index in range(count))
    loaded = cute.arch.inline_ptx(
        f"ld.global.L1::no_allocate.v{count}.u32 {{{targets}}}, [{{$r0}}];"
        if count > 1
        else "ld.global.u32 {$w0}, [{$r0}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return list(loaded) if count > 1 else [loaded]


def _widen(word: Uint32, dtype: str) -> list[Float32]:
    """The values in one word."""
    if dtype == "float32":
        return [_widen_op("mov.b32 $0, $1;", word)]
    if dtype == "float16":
        code = "{{.reg .b16 a, b; mov.b32 {{a, b}}, $1; cvt.f32.f16 $0, {half};}}"
        return [_widen_op(code.format(half=half), word) for half in "ab"]
    return [_widen_op("mov.b32 $0, $1;", word << 16), _widen_op("mov.b32 $0, $1;", word & Uint32(0xFFFF0000))]


def _narrow(values: list[Float32], dtype: str) -> list[Uint32]:
    """Values to words."""
    if dtype == "float32":
        return [_narrow_op("mov.b32 $0, $1;", value) for value in values]
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    pairs = zip(values[::2], values[1::2], strict=True)
    return [_narrow_op(f"cvt.rn.{kind}.f32 $0, $2, $1;", low, high) for low, high in pairs]


def load_chunk(address: Int64, dtype: str, condition: Boolean | None = None) -> list[Float32]:
    """Eight consecutive values in float32; the address is a multiple of 16 bytes and always readable.

    Args:
        address: of the first value.
        dtype: of the values in memory.
        condition: where it does not hold the values are zeros, whatever memory has.
    """
    words: list[Uint32] = []
    for part in range(CHUNK // _WORD_VALUES[dtype] // 4):
        words += _load_words(address + Int64(16 * part), 4)
    if condition is not None:
        words = keep(words, condition)
    return [value for word in words for value in _widen(word, dtype)]


def load_value(address: Int64, dtype: str, condition: Boolean | None = None) -> Float32:
    """One value in float32, at its own alignment; arguments as `load_chunk`."""
    if dtype == "float32":
        (word,) = _load_words(address, 1)
    else:
        word = cute.arch.inline_ptx(
            "{.reg .b16 h; ld.global.b16 h, [{$r0}]; mov.b32 {$w0}, {h, h};}",
            write_only_types=[Uint32],
            read_only_args=[address],
        )
    if condition is not None:
        (word,) = keep([word], condition)
    return _widen(word, dtype)[0]


def store_chunk(
    address: Int64, values: list[Float32], dtype: str, predicate: Boolean | None, live: Boolean | None = None
) -> None:
    """Eight values to memory, each rounded once to the dtype; the address is a multiple of 16 bytes.

    Args:
        address: of the first value.
        values: what to store.
        dtype: of the values in memory.
        predicate: where it does not hold nothing is stored; None for a store that always happens.
        live: where it does not hold zeros are stored, whatever the values are.
    """
    words = _narrow(values, dtype)
    if live is not None:
        words = keep(words, live)
    for part in range(len(words) // 4):
        cute.arch.inline_ptx(
            "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address + Int64(16 * part), *words[4 * part : 4 * part + 4]],
            predicate=predicate,
        )


def store_value(address: Int64, value: Float32, dtype: str, predicate: Boolean | None) -> None:
    """One value, rounded once to the dtype, to memory; predicate as `store_chunk`."""
    if VALUE_BYTES[dtype] == 4:
        (word,) = _narrow([value], dtype)
        cute.arch.inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[address, word], predicate=predicate)
        return
    (word,) = _narrow([value, value], dtype)
    cute.arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[address, Uint16(word)], predicate=predicate)


def accumulate(address: Int64, values: list[Float32], has_vector: bool) -> None:
    """Add four values to four float32 in global memory, in no order among threads.

    Args:
        address: of the first, a multiple of 16 bytes.
        values: what to add.
        has_vector: whether the target adds four with one instruction.
    """
    if has_vector:
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address, *values],
        )
        return
    for index, value in enumerate(values):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};",
            read_only_args=[address + Int64(4 * index), value],
        )


@cute.jit
def load_index(address: Int64, place: Int32, width: Int32, absent: Int32) -> Int32:
    """Element `place` of an int32 (width 4) or int64 (width 8) array; `absent` where there is no array (width 0).

    An int64 outside [0, 2^31) becomes a negative number.
    """
    index = absent
    if width == 4:
        index = cute.arch.inline_ptx(
            "ld.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[address + Int64(place) * 4],
        )
    if width == 8:
        low, high = cute.arch.inline_ptx(
            "ld.global.v2.s32 {{$w0}, {$w1}}, [{$r0}];",
            write_only_types=[Int32, Int32],
            read_only_args=[address + Int64(place) * 8],
        )
        index = low
        if high != 0:
            index = Int32(-1)
    return index
