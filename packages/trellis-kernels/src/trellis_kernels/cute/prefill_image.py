"""Owns the kernel that makes the image of packed rows, and the arguments of its launch.

It must not know tensors or codes.

An image is what the many-row GEMM copies to shared memory as it lies: for each 64 input channels a panel of all packed
rows, 128 bytes a row, its channels in the order of `prefill_share.channel_order` and its 16-byte pieces in the swizzle
of `wgmma`.  Rows of one expert follow each other, so a tile of any block of rows is contiguous, and one copy moves it.

A lane has the channels of half z of a panel: 8 neighbouring ones from each 16, four times.  Those give the piece of
every fragment i, so that rows are read and written 16 bytes at a time.  A block of 128 channels is four lanes, hence a
rotation is five butterflies in registers and two across lanes.  A warp takes eight rows of one expert, and reads the
scales once for all of them.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute import wgmma
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.prefill_key import PrefillImageKey
from trellis_kernels.cute.prefill_share import PANEL_CHANNELS, PANEL_ROW_BYTES, PIECE_BYTES, ROW_GROUP
from trellis_kernels.cute.window import LANES

__all__ = ["build"]

_WARPS = 4
_RESIDENT = 3  # thread blocks on an SM, which hold registers to 168
_LANE_CHANNELS = 32
_WARP_CHANNELS = LANES * _LANE_CHANNELS
_NORM = 1.0 / math.sqrt(HADAMARD_BLOCK)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _load_scales(address: Int64) -> list[Any]:
    """A lane's channels as fp16 pairs: pair 4 t + i is channels 16 t + 2 i and the next, past its first."""
    return [word for t in range(4) for word in gpu.load_words(address + 32 * t, 4)]


def _load_row(g_row: Int64, channel: Int32, width: Int32, dtype: str) -> list[Any]:
    """A lane's channels as words: 8 channels for each t; anything beyond the width."""
    words = []
    for t in range(4):
        place = channel + 16 * t
        g_eight = g_row + Int64(place * Int32(place < width) * VALUE_BYTES[dtype])
        for part in range(VALUE_BYTES[dtype] // 2):
            words += gpu.load_words(g_eight + 16 * part, 4, read_only=False)
    return words


def _row_values(words: list[Any], channel: Int32, width: Int32, dtype: str) -> list[Float32]:
    """Words to values: value 8 t + 2 i + j is channel 16 t + 2 i + j past the lane's first; zero beyond the width."""
    if dtype == "float32":
        values = [gpu.float_from(word, dtype, 0) for word in words]
    else:
        values = [value for word in words for value in gpu.floats_from(word, dtype)]
    return [gpu.choose(Int32(channel + 16 * (index // 8) < width) - 1, value) for index, value in enumerate(values)]


def _rotate(values: list[Float32], lane: Int32) -> list[Float32]:
    """The normalised transform over the 128 channels of four neighbouring lanes.

    The lowest bit of a lane is half z, the next the panel.
    """
    for bit in range(5):
        half = 1 << bit
        values = [
            values[index - half] - value if index & half else value + values[index + half]
            for index, value in enumerate(values)
        ]
    for distance in (1, 2):
        sign = Float32(1 - 2 * ((lane // distance) & 1))
        values = [gpu.fma(value, sign, gpu.lane_swap(value, distance)) for value in values]
    return [value * Float32(_NORM) for value in values]


def _store_lane(g_row: Int64, values: list[Float32], half: Int32, swizzle: Int32, live: Boolean) -> None:
    for i in range(4):
        words = [gpu.pack_halves(values[8 * t + 2 * i], values[8 * t + 2 * i + 1]) for t in range(4)]
        gpu.store_words(g_row + Int64(((2 * i + half) ^ swizzle) * PIECE_BYTES), words, live)


@cute.kernel
def _image_kernel(
    x: Int64,
    first_scales: Int64,
    last_scales: Int64,
    routes: Int64,
    block_experts: Int64,
    packed_count: Int64,
    first_image: Int64,
    last_image: Int64,
    first_slot: Int32,
    slots: Int32,
    image_rows: Int32,
    channels: Int32,
    width: Int32,
    x_pitch: Int32,
    routes_per_row: Int32,
    route_count: Int32,
    scale_rows: Int32,
    scale_pitch: Int32,
    block_rows: Int32,
    key: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    first_group, chunk, _ = cute.arch.block_idx()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    row = (first_group * _WARPS + warp) * ROW_GROUP
    half = lane & 1
    panel = chunk * (_WARP_CHANNELS // PANEL_CHANNELS) + lane // 2
    channel = panel * PANEL_CHANNELS + 8 * half
    slot = first_slot + row
    end = cutlass.min(gpu.load_ints(packed_count, 1)[0], first_slot + slots)
    known = Boolean(channel < channels)
    channel = cutlass.min(channel, channels - PANEL_CHANNELS + 8 * half)
    if slot < end:
        expert = gpu.load_ints(block_experts + Int64(slot // block_rows) * 4, 1)[0]
        route = gpu.load_ints(routes + Int64(slot + (lane & (ROW_GROUP - 1))) * 4, 1)[0]
        table_row = expert if scale_rows > 1 else Int32(0)
        g_scales = (Int64(table_row) * Int64(scale_pitch) + Int64(channel)) * 2
        for image in cutlass.range_constexpr(max(key.images, 1)):
            scales = []
            if cutlass.const_expr(key.images):
                scales = _load_scales((first_scales, last_scales)[image] + g_scales)
            g_panel = (first_image, last_image)[image] + (
                Int64(panel) * Int64(image_rows) + Int64(row)
            ) * PANEL_ROW_BYTES
            ahead = _load_row(
                _row_address(x, x_pitch, route, 0, route_count, routes_per_row, key), channel, width, key.in_dtype
            )
            r_ahead = cute.make_rmem_tensor(cute.make_layout((len(ahead),)), Uint32)
            for place in cutlass.range_constexpr(len(ahead)):
                r_ahead[place] = ahead[place]
            for index in cutlass.range(ROW_GROUP, unroll=1):
                words = [r_ahead[place] for place in range(r_ahead.shape[0])]
                following = cutlass.min(index + 1, ROW_GROUP - 1)
                g_row = _row_address(x, x_pitch, route, following, route_count, routes_per_row, key)
                ahead = _load_row(g_row, channel, width, key.in_dtype)
                for place in cutlass.range_constexpr(len(words)):
                    r_ahead[place] = ahead[place]
                values = _row_values(words, channel, width, key.in_dtype)
                live = Boolean(cute.arch.shuffle_sync(route, index) < route_count) & known
                if cutlass.const_expr(key.images):
                    # widened anew for each row: kept as fp32, the scales would take twice the registers
                    factors = [value for word in scales for value in gpu.floats_from(wgmma.again(word), "float16")]
                    values = _rotate([a * b for a, b in zip(values, factors, strict=True)], lane)
                _store_lane(g_panel + Int64(index * PANEL_ROW_BYTES), values, half, index, live)


def _row_address(
    x: Int64, pitch: Int32, route: Int32, index: Any, route_count: Int32, routes_per_row: Int32, key: PrefillImageKey
) -> Int64:
    """The row of x of the route that lane `index` holds; the last row's for padding."""
    source = cutlass.min(cute.arch.shuffle_sync(route, index), route_count - 1) // routes_per_row
    return x + Int64(source) * Int64(pitch * VALUE_BYTES[key.in_dtype])


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _image_host(
    x: Int64,
    first_scales: Int64,
    last_scales: Int64,
    routes: Int64,
    block_experts: Int64,
    packed_count: Int64,
    first_image: Int64,
    last_image: Int64,
    first_slot: Int32,
    slots: Int32,
    image_rows: Int32,
    channels: Int32,
    width: Int32,
    x_pitch: Int32,
    routes_per_row: Int32,
    route_count: Int32,
    scale_rows: Int32,
    scale_pitch: Int32,
    block_rows: Int32,
    key: Constexpr,
    stream: cuda.CUstream,
):
    rows_at_once = _WARPS * ROW_GROUP
    _image_kernel(
        x, first_scales, last_scales, routes, block_experts, packed_count, first_image, last_image, first_slot, slots,
        image_rows, channels, width, x_pitch, routes_per_row, route_count, scale_rows, scale_pitch, block_rows, key,
    ).launch(
        grid=[(slots + rows_at_once - 1) // rows_at_once, (channels + _WARP_CHANNELS - 1) // _WARP_CHANNELS, 1],
        block=[_WARPS * LANES, 1, 1],
        stream=stream,
        min_blocks_per_mp=_RESIDENT,
        preferred_smem_carveout=0,
    )  # fmt: skip


def build(key: PrefillImageKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (8 addresses, 11 numbers, stream) in the order of the host function above.
    """
    return cute.compile(_image_host, *[Int64(0)] * 8, *[Int32(1)] * 11, key, cuda.CUstream(0), options=options)
