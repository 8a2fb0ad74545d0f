"""Owns the decode ceiling: kernels that decode, fold and store almost nothing, which bound every GEMM over codes.

It must not be used for results.  A lane cuts and decodes what it does in the few-row GEMM, so what is missing is the
product with rows alone.  One variant reads each tile from memory once; the other decodes what it read first over and
over, so that no memory is in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, Int64, Uint32

from trellis_format.codebooks import get_codebook
from trellis_format.rates import TILE_WEIGHTS, Rate
from trellis_kernels.cute import compiler, gemm_primitives, primitives
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.gemm_loop import Piece, multiply_cost, pairs_of
from trellis_kernels.cute.gemm_share import STEP_TILES, STRIP_TILES, Share, share_of
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.window import LANES

__all__ = ["CeilingKey", "build", "launch_ceiling"]

_WARPS = 4
_BLOCKS_PER_SM = 4
_STEP_TILES = STRIP_TILES * STEP_TILES  # the next step's words are loaded while these are decoded


@dataclass(frozen=True)
class CeilingKey(KernelKey):
    """A ceiling kernel.

    Args:
        arch: compile target.
        codebook: one that is arithmetic alone.
        half_bits: the rate as 2K.
        streams: whether each tile comes from memory.

    Raises:
        FormatValueError: if the codebook is unknown or 2K is not legal for it.
        KernelValueError: if the target is unknown.
    """

    kernel: ClassVar[str] = "ceiling"
    module: ClassVar[str] = "trellis_kernels.cute.ceiling"

    codebook: str
    half_bits: int
    streams: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        get_codebook(self.codebook).check_rate(Rate(self.half_bits))

    def __str__(self) -> str:
        source = "stream" if self.streams else "registers"
        return f"{self.kernel} {self.arch} {self.codebook} K={Rate(self.half_bits)} {source}"


def _share(codebook: str, rate: Rate) -> Share:
    return share_of(rate, multiply_cost(codebook, "exact"))


def _load(r_words: Any, g_share: Int64, share: Share) -> None:
    """Issue the loads of one step of this lane."""
    for first in range(0, share.step_words, share.load_words):
        loaded = gemm_primitives.load_words(g_share + Int64(4 * first), share.load_words, once=True)
        for index in range(share.load_words):
            r_words[first + index] = loaded[index]


def _fold(words: list[Uint32], share: Share, lane: Int32, codebook: str, total: Uint32) -> Uint32:
    """Decode every window of a step into one word."""
    for piece in range(share.pieces):
        own = words[piece * share.words : (piece + 1) * share.words]
        for pair in pairs_of(Piece(own.__getitem__, share, lane), share, codebook, Int32(0)):
            total = total ^ pair
        if share.pieces > 1:  # from the lane itself: the assembler would decode all pieces at once, and spill
            total = gemm_primitives.pull_from_lane(total, lane)
    return total


@cute.kernel
def _ceiling_kernel(
    codes: Int64, out: Int64, steps: Int32, half_bits: Constexpr, codebook: Constexpr, streams: Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    share = _share(codebook, Rate(half_bits))
    lane = thread % LANES
    warp = block * _WARPS + thread // LANES
    warps = blocks * _WARPS
    lane_bytes = 4 * share.step_words
    r_words = cute.make_rmem_tensor(cute.make_layout(share.step_words), Uint32)
    r_total = cute.make_rmem_tensor(cute.make_layout(1), Uint32)
    r_total[0] = Uint32(0)
    g_lane = codes + Int64(lane * lane_bytes)
    _load(r_words, g_lane + Int64(cutlass.min(warp, steps - 1)) * (LANES * lane_bytes), share)
    for step in cutlass.range(warp, steps, warps, unroll=1):
        words = [r_words[index] for index in range(share.step_words)]
        if cutlass.const_expr(streams):
            ahead = cutlass.min(step + warps, steps - 1)
            _load(r_words, g_lane + Int64(ahead) * (LANES * lane_bytes), share)
        else:
            for index in cutlass.range_constexpr(share.step_words):
                r_words[index] = words[index] + Uint32(0x01010101)
        r_total[0] = _fold(words, share, lane, codebook, r_total[0])
    if r_total[0] == Uint32(0x12345678):  # keeps the sum alive, and stores next to nothing
        primitives.store_global_16_bytes(out, [r_total[0]] * 4, None)


@cute.jit
def _ceiling_host(
    codes: Int64,
    out: Int64,
    steps: Int32,
    blocks: Int32,
    half_bits: Constexpr,
    codebook: Constexpr,
    streams: Constexpr,
    stream: cuda.CUstream,
):
    _ceiling_kernel(codes, out, steps, half_bits, codebook, streams).launch(
        grid=[blocks, 1, 1], block=[_WARPS * LANES, 1, 1], stream=stream
    )


def build(key: CeilingKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (codes address, out address, steps, blocks, stream).
    """
    return cute.compile(
        _ceiling_host,
        *(Int64(0) for _ in range(2)),
        *(Int32(1) for _ in range(2)),
        key.half_bits,
        key.codebook,
        key.streams,
        cuda.CUstream(0),
        options=options,
    )


def launch_ceiling(codes: torch.Tensor, *, codebook: str, rate: Rate, streams: bool, scratch: torch.Tensor) -> int:
    """Decode every whole step of tiles and keep nothing.

    Args:
        codes: `[tiles, 16*K] int16` on a CUDA device.
        codebook: one that is arithmetic alone.
        rate: K.
        streams: whether tiles come from memory, or the first ones are decoded again and again.
        scratch: any 16-byte aligned memory of 16 bytes on that device.

    Returns:
        Weights decoded.
    """
    index = codes.device.index
    key = CeilingKey(arch_of_device(index).name, codebook, rate.half_bits, streams)
    steps = codes.shape[0] // _STEP_TILES
    blocks = torch.cuda.get_device_properties(index).multi_processor_count * _BLOCKS_PER_SM
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    compiler.ready(key)(codes.data_ptr(), scratch.data_ptr(), steps, blocks, stream)
    return steps * _STEP_TILES * TILE_WEIGHTS
