"""Owns the Hopper instructions of the many-row GEMM: `wgmma` with A in registers, bulk copies and barrier arrivals.

It must not know rings, codebooks or experts.  Shared memory addresses are `Int32`, global ones `Int64`.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = [
    "again",
    "arrive",
    "arrive_copied",
    "arrive_expecting",
    "copy_bulk",
    "copy_or_zero",
    "copy_where",
    "descriptor_word",
    "multiply",
    "pick",
    "pin",
    "store_where",
    "thread_index",
]

_SWIZZLE_128 = 1 << 30  # of the descriptor's upper word
_GROUP_UNITS = 1024 // 16  # 16-byte units from one group of eight rows to the next
_DESCRIPTOR_HIGH = _SWIZZLE_128 | _GROUP_UNITS


def descriptor_word(address: Int32) -> Int32:
    """Lower word of the descriptor of a K-major B tile in the 128-byte swizzle.

    The address is a multiple of 1024 bytes.  A step of 16 channels, 32 bytes, is 2 units further.
    """
    return ((address >> 4) & 0x3FFF) | (1 << 16)


@dsl_user_op
def multiply(
    sums: list[Float32], a: list[Uint32], low: Int32, columns: int, adds: Int32, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """Issue `sums += A B` for a warpgroup: A is 64 x 16 fp16 in registers, B 16 x `columns` fp16 in shared memory.

    Where `adds` is 0, what the sums held does not count.  The results are valid once the group is waited for, and A
    must not change before that.
    """
    count = columns // 2
    results = ", ".join(f"${index}" for index in range(count))
    fragment = ", ".join(f"${2 * count + index}" for index in range(4))
    code = (
        f"{{.reg .b64 d; .reg .pred p; setp.ne.u32 p, ${2 * count + 5}, 0; "
        f"mov.b64 d, {{${2 * count + 4}, {_DESCRIPTOR_HIGH}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{results}}}, {{{fragment}}}, d, p, 1, 1, 0;}}"
    )
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in sums]
    operands += [Uint32(value).ir_value(loc=loc, ip=ip) for value in a]
    operands += [Int32(value).ir_value(loc=loc, ip=ip) for value in (low, adds)]
    constraints = ["=f"] * count + [str(index) for index in range(count)] + ["r"] * 6
    return _volatile(code, operands, constraints, count, loc, ip)


@dsl_user_op
def pin(sums: list[Float32], *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """The same values, which nothing may read before this point; for sums that asynchronous products have written."""
    count = len(sums)
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in sums]
    constraints = ["=f"] * count + [str(index) for index in range(count)]
    return _volatile("", operands, constraints, count, loc, ip)


def _volatile(code: str, operands: list[Any], constraints: list[str], count: int, loc: Any, ip: Any) -> list[Float32]:
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * count),
        operands,
        code,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), result, [index], loc=loc, ip=ip)) for index in range(count)]


@dsl_user_op
def pick(selector: Int32, zero: Float32, other: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """`zero` where the selector is 0, else `other`."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(value).ir_value(loc=loc, ip=ip) for value in (zero, other)]
            + [Int32(selector).ir_value(loc=loc, ip=ip)],
            "{.reg .pred p; setp.eq.s32 p, $3, 0; selp.f32 $0, $1, $2, p;}",
            "=f,f,f,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def again(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same value as if it were another, so that what derives from it is computed anew rather than kept."""
    return _fresh("mov.u32 $0, $1;", "=r,r", [Int32(value).ir_value(loc=loc, ip=ip)], loc, ip)


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """The index of this thread, read anew, so that what derives from it takes no registers before this point."""
    return _fresh("mov.u32 $0, %tid.x;", "=r", [], loc, ip)


def _fresh(code: str, constraints: str, operands: list[Any], loc: Any, ip: Any) -> Int32:
    return Int32(
        llvm.inline_asm(
            T.i32(),
            operands,
            code,
            constraints,
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def copy_bulk(s_target: Int32, g_source: Int64, nbytes: Int32, s_barrier: Int32, predicate: Boolean) -> None:
    """Start a copy to shared memory that completes on a barrier; addresses and bytes are multiples of 16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[s_target, g_source, nbytes, s_barrier],
        predicate=predicate,
    )


def copy_or_zero(s_target: Int32, g_source: Int64, nbytes: Int32) -> None:
    """Start a copy of 16 bytes to shared memory of which those past the first `nbytes`, 0 or 16, are zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[s_target, g_source, nbytes]
    )


def copy_where(s_target: Int32, g_source: Int64, predicate: Boolean | None) -> None:
    """Start a copy of 16 bytes to shared memory where the predicate holds; None, not a constant, is everywhere."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[s_target, g_source], predicate=predicate
    )


def store_where(s_target: Int32, values: list[Int32], predicate: Boolean) -> None:
    """Store four integers to shared memory where the predicate holds."""
    cute.arch.inline_ptx(
        "st.shared.v4.s32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[s_target, *values],
        predicate=predicate,
    )


def arrive(s_barrier: Int32, predicate: Boolean | None = None) -> None:
    """One arrival on a barrier of every lane, or of those where a predicate holds."""
    cute.arch.inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[s_barrier], predicate=predicate)


def arrive_copied(s_barrier: Int32) -> None:
    """One arrival on a barrier once the copies of 16 bytes that this thread has started are done."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[s_barrier])


def arrive_expecting(s_barrier: Int32, nbytes: Int32, predicate: Boolean) -> None:
    """One arrival on a barrier that also announces bytes of copies, where the predicate holds."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[s_barrier, nbytes],
        predicate=predicate,
    )
