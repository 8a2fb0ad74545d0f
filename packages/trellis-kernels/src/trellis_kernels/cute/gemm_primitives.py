"""Owns the GPU instructions that GEMM kernels need beyond `primitives`: vector loads, matrix products, atomics, math.

It must not know rings, codebooks or experts.  Addresses are `Int64` for global and `Int32` for shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = [
    "add_counter",
    "add_shared_counter",
    "add_shared_total",
    "choose",
    "clamp_above",
    "clamp_below",
    "commit_copies",
    "copy_to_shared",
    "count_bits",
    "exp2",
    "fetch_to_l2",
    "float_from",
    "float_to",
    "floats_from",
    "fma",
    "lane_swap",
    "larger",
    "load_floats",
    "load_fresh_ints",
    "load_fresh_longs",
    "load_fresh_words",
    "load_half",
    "load_ints",
    "load_longs",
    "load_shared_again",
    "load_shared_floats",
    "load_shared_int",
    "load_shared_ints",
    "load_words",
    "local_id",
    "magnitude",
    "multiply_bytes",
    "multiply_halves",
    "pack_bytes",
    "pack_halves",
    "pull_from_lane",
    "raise_shared_most",
    "reciprocal",
    "round_to_int",
    "store_floats",
    "store_half",
    "store_shared_floats",
    "store_shared_half",
    "store_shared_int",
    "store_shared_words",
    "store_words",
    "swap_int",
    "wait_for_copies",
    "wait_for_counter",
]

_VECTOR = {1: "", 2: ".v2", 4: ".v4"}


def _braced(prefix: str, count: int, first: int = 0) -> str:
    names = ", ".join(f"{{${prefix}{first + index}}}" for index in range(count))
    return f"{{{names}}}" if count > 1 else names


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _load(space: str, kind: str, types: list[Any], address: Any) -> list[Any]:
    count = len(types)
    code = f"ld.{space}{_VECTOR[count]}.{kind} {_braced('w', count)}, [{{$r0}}];"
    return _as_list(cute.arch.inline_ptx(code, write_only_types=types, read_only_args=[address]))


def _store(space: str, kind: str, address: Any, values: list[Any], predicate: Boolean | None = None) -> None:
    count = len(values)
    code = f"st.{space}{_VECTOR[count]}.{kind} [{{$r0}}], {_braced('r', count, 1)};"
    cute.arch.inline_ptx(code, read_only_args=[address, *values], predicate=predicate)


# ---------------------------------------------------------------------------------------------------------- memory
def load_words(address: Int64, count: int, *, read_only: bool = True, once: bool = False) -> list[Uint32]:
    """1, 2 or 4 consecutive words of global memory; the address is a multiple of their bytes.

    `read_only` takes the path for memory that no running kernel writes.  `once` keeps the line out of the L1, for loads
    that take whole sectors and never come back.
    """
    space = ("global.nc" + (".L1::no_allocate" if once else "")) if read_only else "global"
    return _load(space, "u32", [Uint32] * count, address)


def load_fresh_words(address: Int64, count: int) -> list[Uint32]:
    """1, 2 or 4 consecutive words of global memory, past the L1, as other SMs have just written them."""
    return _load("global.cg", "u32", [Uint32] * count, address)


def load_ints(address: Int64, count: int) -> list[Int32]:
    """1, 2 or 4 consecutive 32-bit integers of global memory."""
    return _load("global", "s32", [Int32] * count, address)


def load_longs(address: Int64, count: int) -> list[Int64]:
    """1 or 2 consecutive 64-bit integers of memory that no running kernel writes."""
    return _load("global.nc", "s64", [Int64] * count, address)


def load_fresh_longs(address: Int64, count: int) -> list[Int64]:
    """1 or 2 consecutive 64-bit integers of global memory, past the L1."""
    return _load("global.cg", "s64", [Int64] * count, address)


def load_fresh_ints(address: Int64, count: int) -> list[Int32]:
    """1, 2 or 4 consecutive 32-bit integers of global memory, past the L1."""
    return _load("global.cg", "s32", [Int32] * count, address)


def fetch_to_l2(address: Int64) -> None:
    """Bring the line of an address into the L2; nothing waits for it."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def copy_to_shared(s_target: Int32, address: Int64, size: int) -> None:
    """Start a copy of 4, 8 or 16 bytes from global memory; both addresses are multiples of them."""
    cute.arch.inline_ptx(f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size};", read_only_args=[s_target, address])


def commit_copies() -> None:
    """Close a group of copies; an empty group counts."""
    cute.arch.inline_ptx("cp.async.commit_group;")


def wait_for_copies(groups: int) -> None:
    """Wait until at most that many of this thread's last groups are under way."""
    cute.arch.inline_ptx(f"cp.async.wait_group {groups};")


def wait_for_counter(address: Int64, target: int) -> None:
    """Return once a 32-bit counter in global memory holds the target; later accesses see what its writers wrote."""
    cute.arch.inline_ptx(
        "{.reg .pred p; .reg .b32 v; AGAIN: ld.acquire.gpu.global.b32 v, [{$r0}]; "
        f"setp.ne.s32 p, v, {target}; @p nanosleep.u32 40; @p bra AGAIN;}}",
        read_only_args=[address],
    )


def load_floats(address: Int64, count: int, *, bypass_l1: bool = False) -> list[Float32]:
    """1, 2 or 4 consecutive fp32 values of global memory; `bypass_l1` sees what other SMs have just written."""
    return _load("global.cg" if bypass_l1 else "global", "f32", [Float32] * count, address)


def load_half(address: Int64) -> Uint32:
    """16 bits of global memory in the low half of a register."""
    result: Uint32 = cute.arch.inline_ptx(
        "{.reg .b16 a; ld.global.b16 a, [{$r0}]; mov.b32 {$w0}, {a, 0};}",
        write_only_types=[Uint32],
        read_only_args=[address],
    )
    return result


def store_words(address: Int64, words: list[Uint32], predicate: Boolean | None = None) -> None:
    """1, 2 or 4 consecutive words to global memory."""
    _store("global", "b32", address, words, predicate)


def store_floats(address: Int64, values: list[Float32], predicate: Boolean | None = None) -> None:
    """1, 2 or 4 consecutive fp32 values to global memory."""
    _store("global", "f32", address, values, predicate)


def store_half(address: Int64, bits: Uint32, predicate: Boolean | None = None) -> None:
    """The low 16 bits of a register to global memory."""
    cute.arch.inline_ptx(
        "{.reg .b16 a, b; mov.b32 {a, b}, {$r1}; st.global.b16 [{$r0}], a;}"
        if predicate is None
        else "{.reg .pred q; .reg .b16 a, b; setp.ne.u32 q, {$r2}, 0; mov.b32 {a, b}, {$r1}; "
        "@q st.global.b16 [{$r0}], a;}",
        read_only_args=[address, bits] if predicate is None else [address, bits, Uint32(predicate)],
    )


def load_shared_floats(address: Int32, count: int) -> list[Float32]:
    """1, 2 or 4 consecutive fp32 values of shared memory."""
    return _load("shared", "f32", [Float32] * count, address)


def load_shared_ints(address: Int32, count: int) -> list[Int32]:
    """1, 2 or 4 consecutive 32-bit integers of shared memory."""
    return _load("shared", "s32", [Int32] * count, address)


def store_shared_floats(address: Int32, values: list[Float32]) -> None:
    """1, 2 or 4 consecutive fp32 values to shared memory."""
    _store("shared", "f32", address, values)


def store_shared_words(address: Int32, words: list[Uint32]) -> None:
    """1, 2 or 4 consecutive words to shared memory."""
    _store("shared", "b32", address, words)


def store_shared_half(address: Int32, bits: Uint32) -> None:
    """The low 16 bits of a register to shared memory."""
    cute.arch.inline_ptx(
        "{.reg .b16 a, b; mov.b32 {a, b}, {$r1}; st.shared.b16 [{$r0}], a;}", read_only_args=[address, bits]
    )


def load_shared_again(address: Int32, count: int) -> list[Uint32]:
    """1, 2 or 4 consecutive words of shared memory, by a load that the compiler does not join with another."""
    return _load("volatile.shared", "u32", [Uint32] * count, address)


def load_shared_int(address: Int32) -> Int32:
    """One 32-bit integer of shared memory."""
    value: Int32 = _load("shared", "s32", [Int32], address)[0]
    return value


def store_shared_int(address: Int32, value: Int32) -> None:
    """One 32-bit integer to shared memory."""
    _store("shared", "s32", address, [value])


def add_shared_counter(address: Int32, value: Int32) -> Int32:
    """Add to a 32-bit counter in shared memory; returns what it held."""
    result: Int32 = cute.arch.inline_ptx(
        "atom.shared.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )
    return result


def add_shared_total(address: Int32, value: Int32, predicate: Boolean) -> None:
    """Add to a 32-bit integer in shared memory, where the predicate holds."""
    cute.arch.inline_ptx("red.shared.add.s32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate)


def raise_shared_most(address: Int32, value: Float32, predicate: Boolean) -> None:
    """Raise an fp32 value in shared memory to at least another, neither negative, where the predicate holds.

    NaN is above all.
    """
    bits = _pure("mov.b32 $0, $1;", "r", "f", Float32(value))
    cute.arch.inline_ptx("red.shared.max.u32 [{$r0}], {$r1};", read_only_args=[address, bits], predicate=predicate)


def add_counter(address: Int64, value: Int32) -> Int32:
    """Add to a 32-bit counter in global memory; returns what it held.

    Ordered, as the whole device sees it, with this thread's accesses and with those of the thread block that a barrier
    has ordered with them: so one thread speaks for all, and nobody else needs a fence.
    """
    result: Int32 = cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, value],
    )
    return result


# -------------------------------------------------------------------------------------------------------- registers
@dsl_user_op
def _pure(code: str, result: Any, constraints: str, *operands: Any, loc: Any = None, ip: Any = None) -> Any:
    kind = {"f": (Float32, T.f32()), "r": (Uint32, T.i32())}[result]
    return kind[0](
        llvm.inline_asm(
            kind[1],
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            code,
            ",".join([f"={result}", *constraints]),
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """`a * b + c` with one rounding."""
    return _pure("fma.rn.f32 $0, $1, $2, $3;", "f", "fff", Float32(a), Float32(b), Float32(c))


def clamp_above(value: Float32, limit: float) -> Float32:
    """The smaller of a value and a limit; NaN stays NaN."""
    return _pure("min.NaN.f32 $0, $1, $2;", "f", "ff", Float32(value), Float32(limit))


def clamp_below(value: Float32, limit: float) -> Float32:
    """The larger of a value and a limit; NaN stays NaN."""
    return _pure("max.NaN.f32 $0, $1, $2;", "f", "ff", Float32(value), Float32(limit))


def exp2(value: Float32) -> Float32:
    """2 to the power of the value, within 2 units of the last place."""
    return _pure("ex2.approx.ftz.f32 $0, $1;", "f", "f", Float32(value))


def reciprocal(value: Float32) -> Float32:
    """1 / value, within 1 unit of the last place."""
    return _pure("rcp.approx.ftz.f32 $0, $1;", "f", "f", Float32(value))


def pack_halves(low: Float32, high: Float32) -> Uint32:
    """Two fp32 values to an fp16 pair, rounded to nearest even."""
    return _pure("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff", Float32(low), Float32(high))


def floats_from(word: Uint32, dtype: str) -> list[Float32]:
    """The two values of a word of `float16` or `bfloat16`, low half first."""
    return [float_from(word, dtype, half) for half in range(2)]


def float_from(word: Uint32, dtype: str, half: int) -> Float32:
    """One value of a word: half 0 or 1 of `float16` or `bfloat16`, or the whole word of `float32`."""
    if dtype == "float16":
        code = f"{{.reg .b16 a, b; mov.b32 {{a, b}}, $1; cvt.f32.f16 $0, {'ab'[half]};}}"
    elif dtype == "bfloat16":
        move = ("shl.b32 x, $1, 16;", "and.b32 x, $1, 0xFFFF0000;")[half]
        code = f"{{.reg .b32 x; {move} mov.b32 $0, x;}}"
    else:
        code = "mov.b32 $0, $1;"
    return _pure(code, "f", "r", Uint32(word))


def float_to(values: list[Float32], dtype: str) -> list[Uint32]:
    """An even number of fp32 values to words of a dtype, rounded to nearest even."""
    if dtype == "float32":
        return [_pure("mov.b32 $0, $1;", "r", "f", Float32(value)) for value in values]
    code = {"float16": "cvt.rn.f16x2.f32 $0, $2, $1;", "bfloat16": "cvt.rn.bf16x2.f32 $0, $2, $1;"}[dtype]
    return [
        _pure(code, "r", "ff", Float32(low), Float32(high)) for low, high in zip(values[::2], values[1::2], strict=True)
    ]


def lane_swap(value: Float32, mask: int) -> Float32:
    """The value of the lane whose index differs by exactly the bits of the mask."""
    result: Float32 = cute.arch.inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {mask}, 31, -1;", write_only_types=[Float32], read_only_args=[value]
    )
    return result


def pull_from_lane(value: Uint32, lane: Int32) -> Uint32:
    """The value of the named lane."""
    return _pure("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "r", "rr", Uint32(value), Uint32(lane))


# --------------------------------------------------------------------------------------------------- matrix products
def multiply_halves(a: list[Uint32], b: list[Uint32], c: list[Float32]) -> list[Float32]:
    """`m16n8k16` of fp16 pairs into fp32: a is 16 x 16, b is 16 x 8, c and the result are 16 x 8."""
    return list(
        cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def multiply_bytes(a: list[Uint32], b: list[Uint32], c: list[Int32]) -> list[Int32]:
    """`m16n8k32` of u8 by s8 into int32: a is 16 x 32, b is 32 x 8, c and the result are 16 x 8."""
    return list(
        cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Int32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def local_id(low: Uint32, high: Uint32, g_map: Int64, map_length: Int32, map_bytes: Int32, experts: Int32) -> Int32:
    """The local expert of an id of two words, else -1.

    With a map, which has values of 4 or 8 bytes, that is the value at the id, if it is below the number of experts;
    with `map_bytes` of 0 the id itself.
    """
    code = (
        "{.reg .pred p, q, w; .reg .b32 a, b; .reg .b64 at; "
        "setp.lt.u32 p, {$r0}, {$r3}; setp.eq.and.u32 p, {$r1}, 0, p; "
        "setp.ne.and.u32 q, {$r4}, 0, p; setp.eq.and.u32 w, {$r4}, 8, p; "
        "mov.b32 a, {$r0}; mov.b32 b, 0; mad.wide.u32 at, {$r0}, {$r4}, {$r2}; "
        "@q ld.global.nc.u32 a, [at]; @w ld.global.nc.u32 b, [at + 4]; "
        "setp.lt.and.u32 p, a, {$r5}, p; setp.eq.and.u32 p, b, 0, p; selp.b32 {$w0}, a, -1, p;}"
    )
    result: Int32 = cute.arch.inline_ptx(
        code,
        write_only_types=[Int32],
        read_only_args=[low, high, g_map, *map(Uint32, (map_length, map_bytes, experts))],
    )
    return result


def choose(mask: Uint32, bit: int, value: Float32) -> Float32:
    """The value where a bit of the mask is set, else zero."""
    code = (
        f"{{.reg .pred p; .reg .b32 a; and.b32 a, $1, {1 << bit}; setp.ne.u32 p, a, 0; "
        "selp.f32 $0, $2, 0f00000000, p;}"
    )
    return _pure(code, "f", "rf", Uint32(mask), Float32(value))


def count_bits(mask: Uint32) -> Int32:
    """How many bits of the mask are set."""
    return Int32(_pure("popc.b32 $0, $1;", "r", "r", Uint32(mask)))


def round_to_int(value: Float32) -> Int32:
    """The nearest integer, ties to even."""
    return Int32(_pure("cvt.rni.s32.f32 $0, $1;", "r", "f", Float32(value)))


def larger(a: Float32, b: Float32) -> Float32:
    """The larger of two values; NaN if either is."""
    return _pure("max.NaN.f32 $0, $1, $2;", "f", "ff", Float32(a), Float32(b))


def magnitude(value: Float32) -> Float32:
    """The absolute value."""
    return _pure("abs.f32 $0, $1;", "f", "f", Float32(value))


def swap_int(value: Int32, mask: int) -> Int32:
    """The value of the lane whose index differs by exactly the bits of the mask."""
    result: Int32 = cute.arch.inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {mask}, 31, -1;", write_only_types=[Int32], read_only_args=[value]
    )
    return result


def pack_bytes(values: list[Int32]) -> Uint32:
    """The low bytes of four integers, the first lowest."""
    low = _pure("prmt.b32 $0, $1, $2, 0x0040;", "r", "rr", Uint32(values[0]), Uint32(values[1]))
    high = _pure("prmt.b32 $0, $1, $2, 0x0040;", "r", "rr", Uint32(values[2]), Uint32(values[3]))
    return _pure("prmt.b32 $0, $1, $2, 0x5410;", "r", "rr", low, high)
