"""Owns the kernel that cuts the segments of packed routes into row blocks, and the arguments of its launch.

It must not know tensors, codes or rows.

A thread has an expert, and counts the blocks before its own by a sum over its warp and one over the warps.  A segment
is cut into the fewest blocks of at most so many rows as a block may have, and those are made as even as multiples of 32
rows allow, because a block costs the decoding of its weights however few rows it has.  A launch of the GEMM has one
pair of rates, so experts with others get no blocks here.  Blocks say where the codes of up to three linears start, so
that who feeds a GEMM needs no descriptor.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.prefill_arguments import ScheduleArguments
from trellis_kernels.cute.prefill_key import CODE_UNIT, ENTRY_CODES, ENTRY_WORDS, ROW_UNIT, PrefillScheduleKey
from trellis_kernels.cute.window import LANES

__all__ = ["build"]

_DESCRIPTOR_BYTES = 16
_UNIT_WORDS = CODE_UNIT // 4
_THREADS = LANES * LANES  # so that a warp sums over the warps


def _count_through(count: Int32, lane: Int32) -> Int32:
    """The sum of this lane's count and those of the lanes below."""
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync(count, cutlass.max(lane - distance, 0))
        count = count + below * Int32(lane >= distance)
    return count


@cute.kernel
def _schedule_kernel(most_units: Constexpr, args: ScheduleArguments):
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    s_totals = cute.arch.alloc_smem(Int32, LANES).toint()
    base = Int32(0)
    for group in cutlass.range((args.experts + (_THREADS - 1)) // _THREADS, unroll=1):
        expert = group * _THREADS + thread
        known = cutlass.min(expert, args.experts - 1)
        count = gpu.load_ints(args.counts + Int64(known) * 4, 1)[0]
        offset = gpu.load_ints(args.offsets + Int64(known) * 4, 1)[0]
        descriptors = [
            gpu.load_longs(table + Int64(known) * _DESCRIPTOR_BYTES, 2)
            for table in (args.first_descriptors, args.last_descriptors, args.third_descriptors)
        ]
        rates = [Int32(descriptor[1]) for descriptor in descriptors]
        codes = [Int32(descriptor[0] // _UNIT_WORDS) for descriptor in descriptors]
        begin = cutlass.max(offset, args.first_slot)
        rows = cutlass.max(cutlass.min(offset + count, args.end_slot) - begin, 0)
        fits = (
            Int32(expert < args.experts)
            * Int32(rates[0] == args.first_half_bits)
            * Int32(rates[1] == args.last_half_bits)
        )
        rows = rows * fits
        units = (rows + (ROW_UNIT - 1)) // ROW_UNIT
        blocks = (units + (most_units - 1)) // most_units
        through = _count_through(blocks, lane)
        cute.arch.sync_threads()  # the totals of the group before have been read
        if lane == LANES - 1:
            gpu.store_shared_int(s_totals + warp * 4, through)
        cute.arch.sync_threads()
        totals = _count_through(gpu.load_shared_int(s_totals + lane * 4), lane)
        lower = cute.arch.shuffle_sync(totals, cutlass.max(warp - 1, 0)) * Int32(warp > 0)
        first = base + lower + through - blocks
        small = units // cutlass.max(blocks, 1)
        larger = units - small * blocks
        row = Int32(0)
        for block in cutlass.range(blocks, unroll=1):
            block_rows = (small + Int32(block < larger)) * ROW_UNIT
            slot = begin + row
            g_entry = args.entries + Int64(first + block) * (4 * ENTRY_WORDS)
            gpu.store_words(g_entry, [expert, slot, cutlass.min(block_rows, rows - row), slot - args.first_slot])
            gpu.store_words(g_entry + 4 * ENTRY_CODES, [*codes, Int32(0)])
            row = row + block_rows
        base = base + cute.arch.shuffle_sync(totals, LANES - 1)
    if thread == 0:
        gpu.store_words(args.entry_count, [base])


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _schedule_host(args: ScheduleArguments, most_units: Constexpr, stream: cuda.CUstream):
    _schedule_kernel(most_units, args).launch(grid=[1, 1, 1], block=[_THREADS, 1, 1], stream=stream)


def build(key: PrefillScheduleKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `ScheduleArguments` and a stream.
    """
    units = key.block_rows // ROW_UNIT
    return cute.compile(_schedule_host, blank(ScheduleArguments), units, cuda.CUstream(0), options=options)
