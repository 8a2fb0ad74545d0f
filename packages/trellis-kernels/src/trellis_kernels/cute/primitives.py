"""Owns the GPU instructions that CuTe DSL has no operator for, as inline PTX.  It must not know rings or codebooks.

Register functions are pure, so that the compiler may share and move them; memory functions keep their order.  Values
are `Uint32` registers unless said otherwise, and `int` arguments are immediates of the instruction.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = [
    "add_halves",
    "and_xor",
    "copy_to_shared",
    "dot_ones",
    "evaluate_line",
    "f16x2_to_bf16x2",
    "f16x2_to_f32",
    "f32_to_f16x2",
    "float_bits",
    "fma_f16x2",
    "funnel_right",
    "join_low_halves",
    "load_global_word",
    "load_shared",
    "load_shared_byte",
    "load_shared_half",
    "load_shared_word",
    "multiply_add",
    "multiply_add_word",
    "multiply_bytes_plain",
    "multiply_halves_to_halves",
    "own_columns",
    "permute_bytes",
    "repeat_half",
    "reverse_bits",
    "store_global_16_bytes",
    "store_matrices_transposed",
    "store_transposed_by_shuffle",
    "sync_warp",
    "take_half",
    "word_of",
]

_AND_XOR_TABLE = 0x6A  # lop3 truth table of (a AND b) XOR c
_BYTE_ONES = 0x01010101
_ONE, _MINUS_ZERO = 0x3C00, 0x8000  # fp16


@dsl_user_op
def _register_op(code: str, *operands: Any, loc: Any = None, ip: Any = None) -> Uint32:
    """One pure instruction sequence: result `$0`, operands `$1` on, all 32-bit registers."""
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [Uint32(operand).ir_value(loc=loc, ip=ip) for operand in operands],
            code,
            ",".join(["=r"] + ["r"] * len(operands)),
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def _immediate(value: int) -> str:
    """A 32-bit immediate; PTX takes a multiplier or mask above 2^31 in its signed form."""
    value &= 0xFFFFFFFF
    return str(value - (1 << 32) if value >> 31 else value)


def funnel_right(low: Uint32, high: Uint32 | None, shift: int | Uint32) -> Uint32:
    """Low 32 bits of `high:low >> shift`, 0 <= shift < 32; a missing high word reads as zero."""
    dynamic = () if isinstance(shift, int) else (shift,)
    if high is None:
        return _register_op(f"shr.u32 $0, $1, {'$2' if dynamic else shift};", low, *dynamic)
    return _register_op(f"shf.r.wrap.b32 $0, $1, $2, {'$3' if dynamic else shift};", low, high, *dynamic)


def permute_bytes(low: Uint32, high: Uint32, selector: int) -> Uint32:
    """Four bytes of `high:low`, each chosen by one nibble of the selector, least significant first."""
    return _register_op(f"prmt.b32 $0, $1, $2, {selector};", low, high)


def multiply_add(value: Uint32, factor: int, addend: int) -> Uint32:
    """`value * factor + addend` modulo 2^32."""
    if addend == 0:
        return _register_op(f"mul.lo.u32 $0, $1, {_immediate(factor)};", value)
    return _register_op(f"mad.lo.u32 $0, $1, {_immediate(factor)}, {_immediate(addend)};", value)


def multiply_add_word(value: Uint32, factor: int, addend: Uint32) -> Uint32:
    """`value * factor + addend` modulo 2^32, the addend in a register."""
    return _register_op(f"mad.lo.u32 $0, $1, {_immediate(factor)}, $2;", value, addend)


def and_xor(value: Uint32, mask: int, flips: int) -> Uint32:
    """`(value AND mask) XOR flips`, one instruction."""
    return _register_op(f"lop3.b32 $0, $1, {_immediate(mask)}, {_immediate(flips)}, {_AND_XOR_TABLE};", value)


def add_halves(first: Uint32, second: Uint32) -> Uint32:
    """fp16 pair `{first.low + first.high, second.low + second.high}`, each sum rounded once."""
    return _register_op(
        "{.reg .b16 a, b, c, d; mov.b32 {a, b}, $1; mov.b32 {c, d}, $2; "
        "add.rn.f16 a, a, b; add.rn.f16 c, c, d; mov.b32 $0, {a, c};}",
        first,
        second,
    )


def dot_ones(value: Uint32, addend: int, factor: int = 1) -> Uint32:
    """`factor` times the sum of the four bytes of `value`, plus `addend`; the factor is a byte."""
    return _register_op(f"dp4a.u32.u32 $0, $1, {factor * _BYTE_ONES}, {_immediate(addend)};", value)


def take_half(value: Uint32, half: int) -> Uint32:
    """The low half (0) or the upper half (1) of `value`, by the pipe that multiplies."""
    return _register_op(f"dp2a.lo.u32.u32 $0, $1, {(1, 1 << 8)[half]}, 0;", value)


def join_low_halves(low: Uint32, high: Uint32) -> Uint32:
    """`low + (high << 16)` modulo 2^32: both low halves in one register, the upper one plus the upper half of `low`."""
    return _register_op("mad.lo.u32 $0, $1, 65536, $2;", high, low)


def fma_f16x2(value: Uint32, scale_bits: int, bias_bits: int) -> Uint32:
    """fp16 pair `value * scale + bias` with one rounding; both constants are fp16 bit patterns for both halves."""
    scale, bias = (_immediate(bits << 16 | bits) for bits in (scale_bits, bias_bits))
    return _register_op(f"{{.reg .b32 s, b; mov.b32 s, {scale}; mov.b32 b, {bias}; fma.rn.f16x2 $0, $1, s, b;}}", value)


def own_columns(lane: Int32, word: int) -> list[Uint32]:
    """Operand B, of 8 columns, of a product that adds up what each register of operand A holds, for its own lane.

    Lane 4g + t gets in column 2t of its rows g and g + 8 the sums of its registers 0 and 1, and in column 2t + 1 those
    of its registers 2 and 3, each value times one of `word`.
    """
    g, t = lane >> 2, lane & 3
    return [Uint32(word) * Uint32(g == 2 * t + column) for column in range(2)]


def multiply_halves_to_halves(a: list[Uint32], b: list[Uint32], addend_bits: int) -> list[Uint32]:
    """`m16n8k16` of fp16 pairs into fp16, plus one fp16 value everywhere: a is 16 x 16, b 16 x 8, the result 16 x 8."""
    return list(
        cute.arch.inline_ptx(
            f"{{.reg .b32 c; mov.b32 c, {_immediate(addend_bits << 16 | addend_bits)}; "
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {{$w0}, {$w1}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {c, c};}",
            write_only_types=[Uint32] * 2,
            read_only_args=[*a, *b],
        )
    )


def multiply_bytes_plain(a: list[Uint32], b: list[Uint32]) -> list[Uint32]:
    """`m16n8k32` of u8 by s8 into 32-bit integers: a is 16 x 32, b 32 x 8, the result 16 x 8."""
    return list(
        cute.arch.inline_ptx(
            "{.reg .b32 c; mov.b32 c, 0; mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {c, c, c, c};}",
            write_only_types=[Uint32] * 4,
            read_only_args=[*a, *b],
        )
    )


def word_of(value: int) -> Uint32:
    """A constant in a register, for instructions that take no immediate."""
    return _register_op(f"mov.b32 $0, {_immediate(value)};")


def repeat_half(value: Uint32, half: int) -> Uint32:
    """The lower (0) or upper (1) fp16 of a pair twice, by arithmetic, which spares the pipe of permutes; no NaN."""
    one, zero = (_immediate(bits << 16 | bits) for bits in (_ONE, _MINUS_ZERO))
    return _register_op(
        f"{{.reg .b16 a, b; .reg .b32 t, s, z; mov.b32 {{a, b}}, $1; mov.b32 t, {{{'ab'[half]}, {'ab'[half]}}}; "
        f"mov.b32 s, {one}; mov.b32 z, {zero}; fma.rn.f16x2 $0, t, s, z;}}",
        value,
    )


def reverse_bits(value: Uint32) -> Uint32:
    """The 32 bits of a register in the opposite order."""
    return _register_op("brev.b32 $0, $1;", value)


def float_bits(value: Uint32) -> Uint32:
    """Bits of the float32 that an integer below 2^24 is, exactly."""
    return _register_op("{.reg .f32 x; cvt.rn.f32.u32 x, $1; mov.b32 $0, x;}", value)


def evaluate_line(segment: Uint32, end_bits: Uint32, start_bits: Uint32) -> Uint32:
    """Bits of float32 `slope * ((end - start - 1) / 2) + base`; base is the low half of `segment`, slope the upper."""
    return _register_op(
        "{.reg .b16 b, s; .reg .f32 x, y, z; mov.b32 {b, s}, $1; mov.b32 x, $2; mov.b32 y, $3; sub.rn.f32 x, x, y; "
        "fma.rn.f32 x, x, 0f3F000000, 0fBF000000; cvt.f32.f16 y, s; cvt.f32.f16 z, b; fma.rn.f32 x, x, y, z; "
        "mov.b32 $0, x;}",
        segment,
        end_bits,
        start_bits,
    )


def f32_to_f16x2(low_bits: Uint32, high_bits: Uint32) -> Uint32:
    """Bits of two float32 values to an fp16 pair, rounded to nearest even."""
    return _register_op(
        "{.reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; cvt.rn.f16x2.f32 $0, y, x;}", low_bits, high_bits
    )


def f16x2_to_bf16x2(pair: Uint32) -> Uint32:
    """fp16 pair to bf16 pair, rounded to nearest even."""
    return _register_op(
        "{.reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, $1; "
        "cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 $0, y, x;}",
        pair,
    )


def f16x2_to_f32(pair: Uint32) -> list[Uint32]:
    """fp16 pair to the bits of two fp32 values, exact."""
    widen = "{{.reg .b16 a, b; .reg .f32 x; mov.b32 {{a, b}}, $1; cvt.f32.f16 x, {half}; mov.b32 $0, x;}}"
    return [_register_op(widen.format(half=half), pair) for half in "ab"]


def load_global_word(address: Int64) -> Uint32:
    """One 32-bit word of memory that no running kernel writes, through the read-only path."""
    return cute.arch.inline_ptx("ld.global.nc.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def load_shared(address: Int32, words: int) -> list[Uint32]:
    """1, 2 or 4 consecutive 32-bit words of shared memory; the address is a multiple of their bytes."""
    targets = ", ".join(f"{{$w{index}}}" for index in range(words))
    loaded = cute.arch.inline_ptx(
        f"ld.shared.v{words}.u32 {{{targets}}}, [{{$r0}}];" if words > 1 else "ld.shared.u32 {$w0}, [{$r0}];",
        write_only_types=[Uint32] * words,
        read_only_args=[address],
    )
    return list(loaded) if words > 1 else [loaded]


def load_shared_half(base: Int32, offset: Uint32) -> Uint32:
    """A 16-bit value of shared memory in the low half, zeros above; the offset is in bytes."""
    return cute.arch.inline_ptx(
        "{.reg .b32 a; .reg .b16 h; add.u32 a, {$r0}, {$r1}; ld.shared.b16 h, [a]; mov.b32 {$w0}, {h, 0};}",
        write_only_types=[Uint32],
        read_only_args=[base, offset],
    )


def load_shared_byte(base: Int32, offset: Uint32) -> Uint32:
    """A byte of shared memory, zeros above; the offset is in bytes."""
    return cute.arch.inline_ptx(
        "{.reg .b32 a; add.u32 a, {$r0}, {$r1}; ld.shared.u8 {$w0}, [a];}",
        write_only_types=[Uint32],
        read_only_args=[base, offset],
    )


def load_shared_word(base: Int32, offset: Uint32) -> Uint32:
    """A 32-bit word of shared memory; the offset is in bytes."""
    return cute.arch.inline_ptx(
        "{.reg .b32 a; add.u32 a, {$r0}, {$r1}; ld.shared.u32 {$w0}, [a];}",
        write_only_types=[Uint32],
        read_only_args=[base, offset],
    )


def copy_to_shared(s_target: Int32, g_source: Int64) -> None:
    """16 bytes from global to shared memory; both addresses are multiples of 16."""
    words = cute.arch.inline_ptx(
        "ld.global.nc.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[g_source],
    )
    cute.arch.inline_ptx("st.shared.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[s_target, *words])


def store_global_16_bytes(address: Int64, words: list[Uint32], predicate: Boolean | None) -> None:
    """Four 32-bit words to global memory, at a multiple of 16 bytes, where the predicate holds; None is everywhere."""
    cute.arch.inline_ptx(
        "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
        predicate=predicate,
    )


def store_matrices_transposed(address: Int32, matrices: list[Uint32]) -> None:
    """Store four 8 x 8 matrices of 16-bit values to shared memory, transposed, by the whole warp.

    Lane L holds elements 2*(L % 4) and 2*(L % 4) + 1 of row L // 4 of each matrix, and gives the address of the 16
    bytes that receive column L % 8 of matrix L // 8.  Needs sm_90.
    """
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *matrices],
    )


def store_transposed_by_shuffle(address: Int32, matrix: Uint32) -> None:
    """Store one 8 x 8 matrix of 16-bit values to shared memory, transposed, by the whole warp.

    Lane L holds the matrix as above, and gives the address of the 4 bytes that receive elements 2*(L % 4) and
    2*(L % 4) + 1 of column L // 4.  For targets without `stmatrix`.
    """
    turned = cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[matrix]
    )
    cute.arch.inline_ptx("st.shared.u32 [{$r0}], {$r1};", read_only_args=[address, turned])


def sync_warp() -> None:
    """Order the warp's accesses to shared memory before this point with those after it."""
    cute.arch.inline_ptx("bar.warp.sync 0xFFFFFFFF;")
