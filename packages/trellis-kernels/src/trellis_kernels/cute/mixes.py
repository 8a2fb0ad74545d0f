"""Owns loops of instruction mixes, which say what a scheduler takes for them.  It must not know any kernel.

A loop of nothing but one mix runs on every multiprocessor at once and is timed by the multiprocessor's own clock: how
many cycles a scheduler takes for a warp to issue the mix once.  Mixes are what a decoded weight takes, so the numbers
say which pipe binds and what would run beside it.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, Int64, Uint32

from trellis_kernels.cute.archs import arch_of_device

__all__ = ["MIXES", "body", "build", "measure"]

Mix = tuple[tuple[str, int], ...]
"""Instructions by name, and how often each occurs."""

_CHAINS = 8  # independent registers of each instruction
_PRODUCT_CHAINS = 4
_LENGTH = 64  # instructions of a turn, about
_TURNS = 200
_SCHEDULERS = 4  # of a multiprocessor

_CODE = {
    "permute": "prmt.b32 {a}, {a}, {b}, 0x4321;",
    "logic": "lop3.b32 {a}, {a}, c0, c1, 0x6A;",
    "shift": "shf.r.wrap.b32 {a}, {a}, {b}, 5;",
    "multiply": "mul.lo.u32 {a}, {a}, c0;",
    "multiply_add": "mad.lo.u32 {a}, {a}, c0, c1;",
    "multiply_high": "mul.hi.u32 {a}, {a}, c0;",
    "dot": "dp4a.u32.u32 {a}, {a}, c0, c1;",
    "dot_halves": "dp2a.lo.u32.u32 {a}, {a}, c0, c1;",
    "join": "mad.lo.u32 {a}, {a}, 65536, {b};",
    "add_halves": "add.rn.f16x2 {a}, {a}, c1;",
    "fma_halves": "fma.rn.f16x2 {a}, {a}, c0, c1;",
}
_PRODUCTS = {  # instruction, type of a sum, registers of sums
    "product": ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "f32", 4),
    "half_product": ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "b32", 2),
    "byte_product": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "b32", 4),
}


def _of(**counts: int) -> Mix:
    return tuple(counts.items())


MIXES: dict[str, Mix] = {
    **{name: ((name, 1),) for name in (*_CODE, *_PRODUCTS)},
    "permute and multiply": _of(permute=1, multiply=1),
    "permute and dot": _of(permute=1, dot=1),
    "permute and fma_halves": _of(permute=1, fma_halves=1),
    "multiply_add and dot": _of(multiply_add=1, dot=1),
    "multiply_add and add_halves": _of(multiply_add=1, add_halves=1),
    "a pair of mcg": _of(permute=3, multiply=2, logic=2, add_halves=2),
    "a pair of mcg joined by fma": _of(permute=2, multiply=2, logic=2, add_halves=2, fma_halves=2),
    "eight of mcg": _of(permute=12, multiply=8, logic=8, add_halves=8, product=1),
    "eight of mcg, one a register": _of(permute=8, multiply=8, logic=8, add_halves=8, product=2),
    "eight of mcg, halves as operands": _of(permute=8, multiply=8, logic=8, product=2),
    "eight of mcg, halves added by products": _of(permute=8, multiply=8, logic=8, half_product=2, product=1),
    "eight of mul1": _of(permute=8, multiply=8, dot=8, join=4, fma_halves=4, product=1),
    "eight of mul1, byte sums as operands": _of(permute=8, multiply=8, dot=8, join=4, product=1),
    "eight of mul1, bytes added by products": _of(permute=12, multiply=8, byte_product=2, fma_halves=4, product=1),
    "eight of mul1, all by products": _of(permute=8, multiply=8, byte_product=2, half_product=2, product=1),
    "four of mul1, bytes as operands": _of(permute=4, multiply=4, byte_product=1),
}
"""What is measured: single instructions, pairs that may share a pipe, and decoded weights without shifts and loads."""


def body(mix: Mix) -> list[str]:
    """The instructions of one turn, evenly interleaved, as PTX; a whole number of mixes."""
    size = sum(count for _, count in mix)
    total = [(name, count * max(_LENGTH // size, 1)) for name, count in mix]
    length = sum(count for _, count in total)
    done = dict.fromkeys((name for name, _ in total), 0)
    lines = []
    for place in range(length):
        name = max(total, key=lambda entry: entry[1] * (place + 1) / length - done[entry[0]])[0]
        lines.append(_instruction(name, done[name]))
        done[name] += 1
    return lines


def _instruction(name: str, index: int) -> str:
    if name in _CODE:
        return _CODE[name].format(a=f"{name}{index % _CHAINS}", b=f"{name}{(index + 3) % _CHAINS}")
    code, _, count = _PRODUCTS[name]
    sums = ", ".join(f"{name}{count * (index % _PRODUCT_CHAINS) + part}" for part in range(count))
    return f"{code} {{{sums}}}, {{c0, c1, c0, c1}}, {{c0, c1}}, {{{sums}}};"


def _registers(name: str) -> tuple[list[str], list[str], list[str]]:
    """Declaration, start and use of the registers of an instruction."""
    if name in _CODE:
        names = [f"{name}{index}" for index in range(_CHAINS)]
        starts = [f"mad.lo.u32 {one}, @r0, {2 * index + 1}, {index};" for index, one in enumerate(names)]
        return [f".reg .b32 {name}<{_CHAINS}>;"], starts, [f"xor.b32 all, all, {one};" for one in names]
    _, kind, count = _PRODUCTS[name]
    names = [f"{name}{index}" for index in range(count * _PRODUCT_CHAINS)]
    zero = "0f00000000" if kind == "f32" else "0"
    uses = [f"{{.reg .b32 bits; mov.b32 bits, {one}; xor.b32 all, all, bits;}}" for one in names]
    return [f".reg .{kind} {name}<{len(names)}>;"], [f"mov.{kind} {one}, {zero};" for one in names], uses


def _code(mix: Mix) -> str:
    """The whole loop, from a thread's number and two constants to a word that depends on everything."""
    parts = [_registers(name) for name, _ in mix]
    declared, starts, uses = ([line for part in parts for line in part[index]] for index in range(3))
    lines = [
        ".reg .pred more; .reg .b32 c0, c1, turn, all;", *declared,
        f"mov.b32 c0, @r1; mov.b32 c1, @r2; mov.b32 all, 0; mov.b32 turn, {_TURNS};", *starts,
        "AGAIN:", *body(mix), "sub.u32 turn, turn, 1; setp.ne.u32 more, turn, 0; @more bra AGAIN;",
        *uses, "mov.b32 @w0, all;",
    ]  # fmt: skip
    text = "{" + " ".join(lines) + "}"
    text = text.replace("@more", "%more")
    for token in ("r0", "r1", "r2", "w0"):
        text = text.replace(f"@{token}", f"{{${token}}}")
    return text.replace("%more", "@more")


@cute.kernel
def _mix_kernel(out: Int64, c0: Uint32, c1: Uint32, mix: Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    threads, _, _ = cute.arch.block_dim()
    cute.arch.sync_threads()
    start = cute.arch.clock64()
    word = cute.arch.inline_ptx(_code(mix), write_only_types=[Uint32], read_only_args=[Uint32(thread), c0, c1])
    cycles = cute.arch.clock64() - start
    if word == Uint32(0x13579BDF):  # keeps the loop alive
        cycles = Int64(0)
    place = out + Int64(block * threads + thread) * 8
    cute.arch.inline_ptx("st.global.s64 [{$r0}], {$r1};", read_only_args=[place, cycles])


@cute.jit
def _host(out: Int64, c0: Uint32, c1: Uint32, blocks: Int32, threads: Constexpr, mix: Constexpr, stream: cuda.CUstream):
    _mix_kernel(out, c0, c1, mix).launch(grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream)


def build(mix: Mix, warps: int, arch: str) -> Any:
    """Compile the loop of a mix for thread blocks of some warps; touches no device.

    Returns:
        A callable of (out address, two constants, blocks, stream).
    """
    arguments = (Int64(0), Uint32(1), Uint32(1), Int32(1), 32 * warps, mix, cuda.CUstream(0))
    return cute.compile(_host, *arguments, options=f"--gpu-arch {arch}")


def measure(mix: Mix, warps: int) -> float:
    """Cycles of a scheduler for a warp's mix, with that many warps on each multiprocessor of the current device."""
    device = torch.cuda.current_device()
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    run = build(mix, warps, arch_of_device(device).name)
    out = torch.zeros(blocks * warps * 32, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the first one warms up
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        run(out.data_ptr(), 0x3C013C03, 0x00010001, blocks, stream)
        torch.cuda.synchronize()
    mixes = _TURNS * len(body(mix)) // sum(count for _, count in mix)
    return float(out.double().median()) / mixes / (warps / _SCHEDULERS)
