"""Owns what the two GEMM launches share: a warp's strip, the choice of its rate, and the sums in shared memory.

It must not know what becomes of the sums.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from trellis_format.rates import Rate
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import primitives
from trellis_kernels.cute.gemm_loop import Loop, accumulate, finish_sums, sum_places
from trellis_kernels.cute.gemm_ring import accumulate_from_ring, ring_bytes
from trellis_kernels.cute.gemm_share import STEP_CHANNELS, STRIP_CHANNELS, share_of
from trellis_kernels.cute.moe_key import PRODUCT_ROWS, ROW_COLUMNS, MoeSmallKey
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS

__all__ = [
    "SUM_PITCH",
    "add_in_order",
    "allocate",
    "allocate_padding",
    "fill_table",
    "lane_rows",
    "load_block_sums",
    "multiply_strip",
    "padded_bytes",
    "shared_bytes",
    "split_steps",
    "store_sums",
    "table_bytes",
    "warp_bytes",
]

SUM_PITCH = STRIP_CHANNELS + 4
"""Floats between rows of a warp's sums in shared memory."""
_PIECE = 16  # bytes that a thread copies at once
_SM_BYTES = 228 * 1024  # of shared memory, on sm_90 and sm_100
_TILE_WORD_BYTES = 16  # bytes of a tile for each half bit of its rate


def warp_bytes(gemm: str, key: MoeSmallKey) -> int:
    """Shared memory of a warp of `up` or `down`: its sums, which lie where the ring of its steps was.

    Byte products have one sum for hi and one for lo.
    """
    sums = key.group_rows * (2 if key.is_bytes else 1) * SUM_PITCH * 4
    tiling = key.tiling(gemm)
    if not tiling.in_shared:
        return sums
    staged = 0 if key.direct else key.row_columns
    rings = (ring_bytes(Rate(rate), staged, key.arithmetic, tiling.stages) for rate in key.rates(gemm))
    return max(sums, *rings)


def shared_bytes(gemm: str, key: MoeSmallKey) -> int:
    """Shared memory of all warps of a thread block."""
    return key.threads(gemm) // 32 * warp_bytes(gemm, key)


def table_bytes(key: MoeSmallKey) -> int:
    """Shared memory of the codebook's table in a thread block, a piece of nothing without one."""
    tabled = TABLE_CODEBOOKS.get(key.codebook)
    return _PIECE if tabled is None else tabled.words.size * 4


def allocate(smem: Any, size: int) -> Int32:
    """Address of so many bytes of a thread block's shared memory."""
    address: Int32 = smem.allocate_array(Int32, size // 4, byte_alignment=16).toint()
    return address


def padded_bytes(gemm: str, needed: int, key: MoeSmallKey) -> int:
    """Shared memory of a thread block that needs some, with what keeps more of them than allowed off an SM."""
    most = key.tiling(gemm).most
    return max(needed, _SM_BYTES // (most + 1) // _PIECE * _PIECE) if most else needed


def allocate_padding(smem: Any, gemm: str, needed: int, key: MoeSmallKey) -> None:
    """Take what `padded_bytes` adds."""
    more = padded_bytes(gemm, needed, key) - needed
    if more:
        allocate(smem, more)


@cute.jit
def fill_table(g_table: Int64, s_table: Int32, thread: Int32, threads: Constexpr, key: Constexpr):
    """Copy the codebook's table, if it has one, to shared memory, by the whole thread block."""
    if cutlass.const_expr(key.codebook in TABLE_CODEBOOKS):
        for piece in cutlass.range(thread, table_bytes(key) // _PIECE, threads, unroll=1):
            primitives.copy_to_shared(s_table + piece * _PIECE, g_table + Int64(piece) * _PIECE)
        cute.arch.sync_threads()


def split_steps(channels: int, split: int, index: Int32) -> tuple[Int32, Int32]:
    """First step and end of one share of the input channels."""
    steps = channels // STEP_CHANNELS
    return steps * index // split, steps * (index + 1) // split


def lane_rows(rows: Int32, lane: Int32, columns: int, key: MoeSmallKey, address: Any) -> Any:
    """This lane's B row of each product: 16 channels of a row; past the last row, that one again.

    Products of fp16 have row g in column g; byte products have row g // 2 in columns {hi, lo}.
    """
    r_addresses = cute.make_rmem_tensor(cute.make_layout((columns,)), Int64)
    g = lane >> 2
    for column in range(columns):
        first = column * PRODUCT_ROWS[key.arithmetic]
        if key.is_bytes:
            row, within = cutlass.min(first + (g >> 1), rows - 1), (lane & 3) * 32 + (g & 1) * 16
        else:
            row, within = cutlass.min(first + g, rows - 1), (lane & 3) * 32
        r_addresses[column] = address(row) + Int64(within)
    return r_addresses


def store_sums(r_sums: Any, s_sums: Int32, lane: Int32, rate: Rate, columns: int, arithmetic: str, rows: int) -> None:
    """Write a warp's sums `[rows, 64]` to shared memory, for byte products `[{hi, lo}, rows, 64]`."""
    share = share_of(rate)
    g, t = lane >> 2, lane & 3
    for place in range(4):
        channel = share.column(place if not share.is_wide else 0, place if share.is_wide else 0, g)
        for column in range(columns):
            for z in range(4):
                value = r_sums[place, column, z]
                if arithmetic == "bytes":
                    row = (z % 2) * rows + column * PRODUCT_ROWS["bytes"] + t
                    s_sum = s_sums + (row * SUM_PITCH + channel + 8 * (z // 2)) * 4
                    gpu.store_shared_int(s_sum, value)
                else:
                    row = column * PRODUCT_ROWS[arithmetic] + 2 * t + z % 2
                    s_sum = s_sums + (row * SUM_PITCH + channel + 8 * (z // 2)) * 4
                    gpu.store_shared_floats(s_sum, [value])


@cute.jit
def _multiply_at_rate(
    g_strip: Int64,
    find_rows: Constexpr,
    s_sums: Int32,
    s_table: Int32,
    rows: Int32,
    first: Int32,
    end: Int32,
    lane: Int32,
    rate: Constexpr,
    gemm: Constexpr,
    key: Constexpr,
):
    tiling = key.tiling(gemm)
    stride = Int32(tiling.slices)
    product_rows = PRODUCT_ROWS[key.arithmetic]
    for index in cutlass.range_constexpr(len(ROW_COLUMNS)):
        if cutlass.const_expr(ROW_COLUMNS[index] <= key.row_columns):
            columns = ROW_COLUMNS[index]
            least = product_rows * ROW_COLUMNS[index - 1] if index else 0
            if rows > least and rows <= product_rows * columns:
                layout = cute.make_layout((sum_places(key.codebook, key.arithmetic), columns, 4))
                r_sums = cute.make_rmem_tensor(layout, Int32 if key.is_bytes else Float32)
                r_sums.fill(0)
                loop = Loop(
                    rate, key.codebook, key.outputs(gemm) // 16, columns, tiling.stages, key.arithmetic, key.direct,
                    tiling.rereads,
                )  # fmt: skip
                if cutlass.const_expr(tiling.in_shared):
                    accumulate_from_ring(r_sums, g_strip, first, end, stride, lane, s_sums, s_table, find_rows, loop)
                else:
                    accumulate(r_sums, g_strip, first, end, stride, lane, s_table, find_rows, loop)
                finish_sums(r_sums, columns, key.codebook, key.arithmetic)
                store_sums(r_sums, s_sums, lane, rate, columns, key.arithmetic, key.group_rows)


@cute.jit
def multiply_strip(
    words: Int64,
    place: Constexpr,
    find_rows: Constexpr,
    s_sums: Int32,
    s_table: Int32,
    strip: Int32,
    rows: Int32,
    first: Int32,
    end: Int32,
    lane: Int32,
    gemm: Constexpr,
    key: Constexpr,
):
    """Multiply a group's rows by one strip of a linear and leave the sums in this warp's shared memory, `s_sums`.

    `place` is the linear's first word and 2K, `strip` the index of the 64 output channels, `find_rows` and `s_table` as
    in `accumulate`, `first` this warp's first step.  Every rate is one branch, which the whole warp takes.
    """
    half_bits = Int32(place[1])
    g_strip = words + place[0] * 4 + Int64(strip * 4 * (half_bits * _TILE_WORD_BYTES))
    for index in cutlass.range_constexpr(len(key.rates(gemm))):
        rate = Rate(key.rates(gemm)[index])
        if half_bits == rate.half_bits:
            _multiply_at_rate(g_strip, find_rows, s_sums, s_table, rows, first, end, lane, rate, gemm, key)


def load_block_sums(s_sums: Int32, row: Int32, lane: Int32, strip: Any, gemm: str, key: MoeSmallKey) -> list[Float32]:
    """Four channels of one row of a block of 128: the sums of its slices, added in order.

    `s_sums` is where the sums of all warps begin; warp w has slice w // strips of strip w % strips, and `strip` is the
    first of the block's two.  Byte sums are added as integers, so that only the join of hi and lo rounds.
    """
    slices = key.tiling(gemm).slices
    first = s_sums + (strip + (lane >> 4)) * warp_bytes(gemm, key) + (row * SUM_PITCH + (lane & 15) * 4) * 4
    stride = key.strips(gemm) * warp_bytes(gemm, key)
    if not key.is_bytes:
        return add_in_order([gpu.load_shared_floats(first + part * stride, 4) for part in range(slices)])
    low = key.group_rows * SUM_PITCH * 4
    hi, lo = (
        add_in_order([gpu.load_shared_ints(first + part * stride + at, 4) for part in range(slices)]) for at in (0, low)
    )
    return [gpu.fma(Float32(a), Float32(256.0), Float32(b)) for a, b in zip(hi, lo, strict=True)]


def add_in_order(parts: list[list[Any]]) -> list[Any]:
    """Sum of lists, element by element."""
    total = parts[0]
    for part in parts[1:]:
        total = [a + b for a, b in zip(total, part, strict=True)]
    return total
