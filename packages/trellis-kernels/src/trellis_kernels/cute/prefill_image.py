"""Owns the kernel that makes the image of packed rows, and the arguments of its launch.

It must not know tensors or codes.

An image is what the many-row GEMM copies to shared memory as it lies: for each 64 input channels a panel of all packed
rows, 128 bytes a row, its channels in the order of `prefill_share.channel_order` and its 16-byte pieces in the swizzle
of `wgmma`.  Rows of one expert follow each other, so a tile of any block of rows is contiguous, and one copy moves it.

A warp takes units of 16 rows by 128 channels, a block of the rotation.  Rows are gathered into its own shared memory by
asynchronous copies, one unit ahead; lanes r and r + 16 then have a row, a panel each, so that six butterflies are
register additions and the last one is an exchange, and the result goes back to that memory in the image's order, from
where it is written in whole lines.  Nothing else is exchanged but through shared memory, which has no bank conflict.  A
whole row a lane would spare the exchange, but registers leave half as many warps, and those do not hide what they wait
for.

One gather serves both images: the kernel is bound by what the L2 moves.  While the rounded values of one wait in
registers for their way out, each lane reads its row for the other, and only then does the image take the rows' place.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import primitives, wgmma
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.prefill_arguments import ImageArguments
from trellis_kernels.cute.prefill_key import GEMM_ARCH, PrefillImageKey
from trellis_kernels.cute.prefill_share import PANEL_CHANNELS, PANEL_ROW_BYTES, PIECE_BYTES, PIECES, ROW_GROUP
from trellis_kernels.cute.window import LANES

__all__ = ["build"]

_ROWS = LANES // 2  # of a unit
_GROUPS = _ROWS // ROW_GROUP
_BUFFERS = 2
_NORM = 1.0 / math.sqrt(HADAMARD_BLOCK)
_PANELS = HADAMARD_BLOCK // PANEL_CHANNELS
_PANEL_BYTES = _ROWS * PANEL_ROW_BYTES
_SCALE_BYTES = HADAMARD_BLOCK * 2  # of one expert
_FACTOR_BYTES = HADAMARD_BLOCK * 4


def row_pitch(dtype: str) -> int:
    """Bytes between the rows of a unit in shared memory."""
    return HADAMARD_BLOCK * VALUE_BYTES[dtype] + PIECE_BYTES


def warps(key: PrefillImageKey) -> tuple[int, int]:
    """Warps of a thread block, and thread blocks on an SM, that shared memory suffices for."""
    if key.arch == GEMM_ARCH:
        one_less = int(key.images == 2)  # whose scales take the shared memory
        return (6 if key.in_dtype == "float32" else 10) - one_less, 2
    return 8 if key.in_dtype != "float32" else 4, 1


def warp_bytes(key: PrefillImageKey) -> int:
    """Shared memory of a warp: rows and scales of two units, and the factors of one image of one."""
    group = _BUFFERS * key.images * _SCALE_BYTES + _FACTOR_BYTES if key.images else 0
    return _BUFFERS * _ROWS * row_pitch(key.in_dtype) + _GROUPS * group


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _copy_rows(
    s_rows: Int32, x: Int64, source: Int32, pitch: Int32, channel: Int32, width: Int32, lane: Int32, dtype: str
) -> None:
    """Start copying a unit's rows; lane r holds the row of x of row r % 16; channels from the width on are zeros."""
    pieces = HADAMARD_BLOCK * VALUE_BYTES[dtype] // PIECE_BYTES  # of a row: 16 or 32
    piece_channels = PIECE_BYTES // VALUE_BYTES[dtype]
    rows_at_once = LANES // pieces
    piece = lane & (pieces - 1)
    inside = channel + piece * piece_channels
    nbytes = Int32(inside < width) * PIECE_BYTES
    g_column = x + Int64(inside * Int32(inside < width)) * VALUE_BYTES[dtype]
    for first in range(0, _ROWS, rows_at_once):
        row = first + lane // pieces
        g_row = g_column + Int64(cute.arch.shuffle_sync(source, row)) * Int64(pitch * VALUE_BYTES[dtype])
        wgmma.copy_or_zero(s_rows + row * row_pitch(dtype) + piece * PIECE_BYTES, g_row, nbytes)


def _copy_scales(s_scales: Int32, scales: Int64, table_row: Int32, pitch: Int32, channel: Int32, lane: Int32) -> None:
    """Start copying the scales of a unit's two groups of rows; lane r holds the table row of row r % 16."""
    pieces = _SCALE_BYTES // PIECE_BYTES
    piece = lane & (pieces - 1)
    for first in range(0, _GROUPS, LANES // pieces):
        group = first + lane // pieces
        row = cute.arch.shuffle_sync(table_row, group * ROW_GROUP)
        g_piece = scales + (Int64(row) * Int64(pitch) + Int64(channel)) * 2 + piece * PIECE_BYTES
        wgmma.copy_or_zero(s_scales + group * _SCALE_BYTES + piece * PIECE_BYTES, g_piece, Int32(PIECE_BYTES))


def _widen_scales(s_scales: Int32, s_factors: Int32, lane: Int32) -> None:
    """Write a unit's scales times the norm as fp32; a lane has 8 of one group."""
    words = primitives.load_shared(s_scales + lane * PIECE_BYTES, 4)
    values = [value * Float32(_NORM) for word in words for value in gpu.floats_from(word, "float16")]
    for part in range(2):
        gpu.store_shared_floats(s_factors + lane * 32 + part * 16, values[4 * part : 4 * part + 4])


def _lane_bytes(lane: Int32, dtype: str) -> Int32:
    """Bytes from the start of a unit's rows to a lane's 64 channels."""
    return (lane & (_ROWS - 1)) * row_pitch(dtype) + lane // _ROWS * (PANEL_CHANNELS * VALUE_BYTES[dtype])


def _factor_bytes(lane: Int32) -> Int32:
    """Bytes from the start of a unit's factors to those of a lane's 64 channels."""
    return (lane & (_ROWS - 1)) // ROW_GROUP * _FACTOR_BYTES + lane // _ROWS * (PANEL_CHANNELS * 4)


def _load_row(s_row: Int32, dtype: str) -> list[Uint32]:
    """A lane's 64 channels of a row, as words."""
    size = PANEL_CHANNELS * VALUE_BYTES[dtype]
    return [word for first in range(0, size, PIECE_BYTES) for word in primitives.load_shared(s_row + first, 4)]


def _values(words: list[Uint32], dtype: str) -> list[Float32]:
    """Words to the values of 64 channels."""
    if dtype == "float32":
        return [gpu.float_from(word, dtype, 0) for word in words]
    return [value for word in words for value in gpu.floats_from(word, dtype)]


def _rotated(values: list[Float32], s_factors: Int32, lane: Int32) -> list[Float32]:
    """64 values times their factors, rotated with those of the lane 16 away."""
    factors = [
        value for first in range(0, PANEL_CHANNELS, 4) for value in gpu.load_shared_floats(s_factors + first * 4, 4)
    ]
    values = [a * b for a, b in zip(values, factors, strict=True)]
    for bit in range(6):
        half = 1 << bit
        values = [
            values[index - half] - value if index & half else value + values[index + half]
            for index, value in enumerate(values)
        ]
    sign = Float32(1 - 2 * (lane // _ROWS))
    return [gpu.fma(value, sign, gpu.lane_swap(value, _ROWS)) for value in values]


def _pieces(values: list[Float32]) -> list[list[Uint32]]:
    """A lane's panel of a row, rounded to fp16, as its pieces."""
    pieces = []
    for piece in range(PIECES):
        i, z = divmod(piece, 2)
        firsts = [16 * t + 8 * z + 2 * i for t in range(4)]
        pieces.append([gpu.pack_halves(values[first], values[first + 1]) for first in firsts])
    return pieces


def _stage_image(pieces: list[list[Uint32]], s_image: Int32, lane: Int32) -> None:
    """Write a lane's pieces to a unit's image in shared memory."""
    row, panel = lane & (_ROWS - 1), lane // _ROWS
    swizzle = row & (ROW_GROUP - 1)
    s_row = s_image + panel * _PANEL_BYTES + row * PANEL_ROW_BYTES
    for piece, words in enumerate(pieces):
        gpu.store_shared_words(s_row + (piece ^ swizzle) * PIECE_BYTES, words)


def _write_image(s_image: Int32, g_image: Int64, panel_bytes: Int64, rows: Int32, lane: Int32) -> None:
    """Write the first `rows` rows of a unit's image from shared memory, four whole rows of a panel at a time."""
    for panel in range(_PANELS):
        for first in range(0, _ROWS, LANES // PIECES):
            offset = first * PANEL_ROW_BYTES + lane * PIECE_BYTES
            words = primitives.load_shared(s_image + panel * _PANEL_BYTES + offset, 4)
            live = cutlass.Boolean(first + lane // PIECES < rows)
            gpu.store_words(g_image + Int64(panel) * panel_bytes + Int64(offset), words, live)


@cute.kernel
def _image_kernel(key: Constexpr, args: ImageArguments):
    thread, _, _ = cute.arch.thread_idx()
    thread_block, _, _ = cute.arch.block_idx()
    thread_blocks, _, _ = cute.arch.grid_dim()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    dtype = key.in_dtype
    block_warps, _ = warps(key)
    s_all = cutlass.memory.SmemAllocator().allocate_array(
        Uint32, block_warps * warp_bytes(key) // 4, byte_alignment=128
    )
    s_warp = s_all.toint() + warp * warp_bytes(key)
    row_bytes = _ROWS * row_pitch(dtype)
    image_scale_bytes = _GROUPS * _SCALE_BYTES
    scale_bytes = key.images * image_scale_bytes
    s_scales = s_warp + _BUFFERS * row_bytes
    s_factors = s_scales + _BUFFERS * scale_bytes
    end = cutlass.min(gpu.load_ints(args.packed_count, 1)[0], args.first_slot + args.slots) - args.first_slot
    row_units = args.channels // HADAMARD_BLOCK
    units = (cutlass.max(end, 0) + (_ROWS - 1)) // _ROWS * row_units
    stride = thread_blocks * block_warps
    first_unit = thread_block * block_warps + warp
    # a division would cost as much as a tenth of a unit, so places advance by additions
    step_rows, step_inside = stride // row_units, stride % row_units
    # of the unit whose copies start next: its rows, its place in them, each lane's row of x, its expert's table row
    r_next = cute.make_rmem_tensor(cute.make_layout((4,)), Int32)
    r_now = cute.make_rmem_tensor(cute.make_layout((2,)), Int32)  # rows and place of the unit at hand
    r_next[0] = first_unit // row_units
    r_next[1] = first_unit % row_units
    if first_unit < units:
        source, table_row = _find(r_next[0], end, args, lane)
        r_next[2] = source
        r_next[3] = table_row
    # before the first unit there is a turn that only starts copies
    for turn in cutlass.range(-1, (units - first_unit + (stride - 1)) // stride, unroll=1):
        row_unit, inside = r_now[0], r_now[1]
        r_now[0] = r_next[0]
        r_now[1] = r_next[1]
        if first_unit + (turn + 1) * stride < units:
            buffer = (turn + 1) & 1
            channel = r_next[1] * HADAMARD_BLOCK
            _copy_rows(s_warp + buffer * row_bytes, args.x, r_next[2], args.x_pitch, channel, args.width, lane, dtype)
            for image in cutlass.range_constexpr(key.images):
                s_target = s_scales + buffer * scale_bytes + image * image_scale_bytes
                _copy_scales(
                    s_target, (args.first_scales, args.last_scales)[image], r_next[3], args.scale_pitch, channel, lane
                )
            over = r_next[1] + step_inside
            carries = Int32(over >= row_units)
            r_next[0] = r_next[0] + step_rows + carries
            r_next[1] = over - carries * row_units
            source, table_row = _find(r_next[0], end, args, lane)
            r_next[2] = source
            r_next[3] = table_row
        gpu.commit_copies()
        if turn >= 0:
            gpu.wait_for_copies(1)
            cute.arch.sync_warp()
            buffer = turn & 1
            s_unit = s_warp + buffer * row_bytes
            row = row_unit * _ROWS
            panel_bytes = Int64(args.image_rows) * PANEL_ROW_BYTES
            offset = Int64(inside * _PANELS) * panel_bytes + Int64(row) * PANEL_ROW_BYTES
            s_row = s_unit + _lane_bytes(lane, dtype)
            words = _load_row(s_row, dtype)
            for image in cutlass.range_constexpr(max(key.images, 1)):
                values = _values(words, dtype)
                if cutlass.const_expr(key.images):
                    _widen_scales(s_scales + buffer * scale_bytes + image * image_scale_bytes, s_factors, lane)
                    cute.arch.sync_warp()
                    values = _rotated(values, s_factors + _factor_bytes(lane), lane)
                pieces = _pieces(values)
                if cutlass.const_expr(image + 1 < key.images):
                    words = _load_row(s_row, dtype)
                cute.arch.sync_warp()  # every row is in registers, so that the image may lie where the rows did
                _stage_image(pieces, s_unit, lane)
                cute.arch.sync_warp()
                _write_image(
                    s_unit, (args.first_image, args.last_image)[image] + offset, panel_bytes, args.slots - row, lane
                )
                cute.arch.sync_warp()


def _find(row_unit: Int32, end: Int32, args: ImageArguments, lane: Int32) -> tuple[Int32, Int32]:
    """This lane's row of x in a unit, the last one for padding, and the row of its expert in a table of scales."""
    slot = args.first_slot + cutlass.min(row_unit * _ROWS + (lane & (_ROWS - 1)), end - 1)
    route = cutlass.min(gpu.load_ints(args.routes + Int64(slot) * 4, 1)[0], args.route_count - 1)
    expert = gpu.load_ints(args.block_experts + Int64(slot // args.block_rows) * 4, 1)[0]
    return route // args.routes_per_row, expert * Int32(args.scale_rows > 1)


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _image_host(args: ImageArguments, key: Constexpr, stream: cuda.CUstream):
    block_warps, resident = warps(key)
    _image_kernel(key, args).launch(
        grid=[args.multiprocessors * resident, 1, 1],
        block=[block_warps * LANES, 1, 1],
        stream=stream,
        min_blocks_per_mp=resident,
        preferred_smem_carveout=100,
    )


def build(key: PrefillImageKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `ImageArguments` and a stream.
    """
    return cute.compile(_image_host, blank(ImageArguments), key, cuda.CUstream(0), options=options)
