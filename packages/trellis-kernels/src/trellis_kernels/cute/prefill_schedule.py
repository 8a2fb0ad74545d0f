"""Owns the kernel that cuts the segments of packed routes into row blocks, and the arguments of its launch.

It must not know tensors, codes or rows.

One warp walks over the experts, 32 at a time.  A segment is cut into the fewest blocks of at most 128 rows, and those
are made as even as multiples of 32 rows allow, because a block costs the decoding of its weights however few rows it
has.  A launch of the GEMM has one pair of rates, so experts with others get no blocks here.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.prefill_key import BLOCK_ROWS_MOST, ROW_UNIT, PrefillScheduleKey
from trellis_kernels.cute.window import LANES

__all__ = ["ENTRY_WORDS", "build"]

ENTRY_WORDS = 4
"""32-bit words of a row block: expert, first slot, rows, first row of the image."""

_DESCRIPTOR_BYTES = 16
_UNITS = BLOCK_ROWS_MOST // ROW_UNIT


@cute.kernel
def _schedule_kernel(
    counts: Int64,
    offsets: Int64,
    first_descriptors: Int64,
    last_descriptors: Int64,
    entries: Int64,
    entry_count: Int64,
    experts: Int32,
    first_slot: Int32,
    end_slot: Int32,
    first_half_bits: Int32,
    last_half_bits: Int32,
):
    lane, _, _ = cute.arch.thread_idx()
    base = Int32(0)
    for group in cutlass.range((experts + (LANES - 1)) // LANES, unroll=1):
        expert = group * LANES + lane
        known = cutlass.min(expert, experts - 1)
        count = gpu.load_ints(counts + Int64(known) * 4, 1)[0]
        offset = gpu.load_ints(offsets + Int64(known) * 4, 1)[0]
        rates = [
            Int32(gpu.load_longs(table + Int64(known) * _DESCRIPTOR_BYTES, 2)[1])
            for table in (first_descriptors, last_descriptors)
        ]
        begin = cutlass.max(offset, first_slot)
        rows = cutlass.max(cutlass.min(offset + count, end_slot) - begin, 0)
        fits = Int32(expert < experts) * Int32(rates[0] == first_half_bits) * Int32(rates[1] == last_half_bits)
        rows = rows * fits
        units = (rows + (ROW_UNIT - 1)) // ROW_UNIT
        blocks = (units + (_UNITS - 1)) // _UNITS
        through = blocks
        for distance in (1, 2, 4, 8, 16):
            below = cute.arch.shuffle_sync(through, cutlass.max(lane - distance, 0))
            through = through + below * Int32(lane >= distance)
        small = units // cutlass.max(blocks, 1)
        larger = units - small * blocks
        row = Int32(0)
        for block in cutlass.range(blocks, unroll=1):
            block_rows = (small + Int32(block < larger)) * ROW_UNIT
            g_entry = entries + Int64(base + through - blocks + block) * (4 * ENTRY_WORDS)
            slot = begin + row
            gpu.store_words(g_entry, [expert, slot, cutlass.min(block_rows, rows - row), slot - first_slot])
            row = row + block_rows
        base = base + cute.arch.shuffle_sync(through, LANES - 1)
    if lane == 0:
        gpu.store_words(entry_count, [base])


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _schedule_host(
    counts: Int64,
    offsets: Int64,
    first_descriptors: Int64,
    last_descriptors: Int64,
    entries: Int64,
    entry_count: Int64,
    experts: Int32,
    first_slot: Int32,
    end_slot: Int32,
    first_half_bits: Int32,
    last_half_bits: Int32,
    stream: cuda.CUstream,
):
    _schedule_kernel(
        counts, offsets, first_descriptors, last_descriptors, entries, entry_count, experts, first_slot, end_slot,
        first_half_bits, last_half_bits,
    ).launch(grid=[1, 1, 1], block=[LANES, 1, 1], stream=stream)  # fmt: skip


def build(key: PrefillScheduleKey, options: str) -> Any:
    """Compile the kernel; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (6 addresses, 5 numbers, stream) in the order of the host function above.
    """
    return cute.compile(_schedule_host, *[Int64(0)] * 6, *[Int32(1)] * 5, cuda.CUstream(0), options=options)
