"""Owns the decode kernel, which writes tiles as a matrix in the rotated basis, and its launch.

It must not know codebooks or rates beyond what `codebooks` and `window` say, nor scales, signs or experts.

A warp decodes strips of four neighbouring tiles of one tile row.  Each lane reads the few ring words that hold its eight
windows, cuts and decodes them, and holds its weights as fragments whose rows are output channels.  The warp stores the
fragments transposed into shared memory, 16-byte pieces exclusive-ored with their row so that neither the store nor the
read has a bank conflict, and then writes 16 bytes a lane: 128 consecutive bytes a row in fp16 and bf16, 256 in fp32.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr

from trellis_format.rates import TILE, Rate
from trellis_kernels.cute import compiler, primitives
from trellis_kernels.cute.archs import arch_of_device, get_arch
from trellis_kernels.cute.codebooks import get_device_codebook
from trellis_kernels.cute.keys import VALUE_BYTES, DecodeKey
from trellis_kernels.cute.window import LANES, cut_windows, lane_geometry, plan_cuts
from trellis_kernels.errors import KernelTypeError, KernelValueError

__all__ = ["build", "decode"]

_WARPS = 4
"""Warps of a block; each has its own strip and its own part of shared memory."""
_STRIP = 4
"""Tiles of a strip."""
_ROW_BYTES = _STRIP * TILE * 2
"""Bytes of a row of a staged strip of fp16 values."""
_STRIP_BYTES = TILE * _ROW_BYTES
_PIECE = 16
"""Bytes that a lane moves at once."""
_GRID_Y = 65535
_GRID_X = 2**31 - 1

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


# ---------------------------------------------------------------------------------------------------- device
def _load_strip(g_row: Int64, first: Int32, n_tiles: Int32, lane: Int32, rate: Rate) -> list[list[Uint32]]:
    """Read each tile's ring words of this lane; tiles past the row's end repeat its last, which stores nothing."""
    geometry = lane_geometry(rate)
    last_word = (geometry.lane_bits * (lane + 1) - 1) >> 5
    offsets = []
    for back in range(geometry.raw_words):
        word = last_word - back
        if back:
            word = cute.arch.select_wrap(word, rate.tile_words32) if False else _wrap(word, rate.tile_words32)
        offsets.append(4 * word)
    words = []
    for index in range(_STRIP):
        tile = cutlass_min(first + index, n_tiles - 1)
        g_tile = tile * rate.tile_bytes
        words.append([primitives.load_global_word(g_row + Int64(g_tile + offset)) for offset in offsets])
    return words
