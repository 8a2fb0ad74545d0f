"""Owns the inner loop of the few-row GEMM with its steps staged in shared memory, a ring for each warp.

It must not know routing, rotations or what becomes of the sums.  The arithmetic and its order are those of
`gemm_loop.accumulate`, so both give the same bits.  A lane copies its own share of a step and reads back what it copied
itself, so that nothing in the loop waits for another lane.  Steps in flight cost no registers, which leaves room for
more warps on an SM.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32

from trellis_format.rates import Rate
from trellis_kernels.cute import gemm_primitives, primitives
from trellis_kernels.cute.gemm_loop import ROW_STEP_BYTES, consume, lane_offset, row_words
from trellis_kernels.cute.gemm_share import Share, share_of
from trellis_kernels.cute.window import LANES

__all__ = ["accumulate_from_ring", "ring_bytes"]

_PIECE_WORDS = 4  # of a copy of a row


def step_bytes(share: Share, columns: int, arithmetic: str) -> int:
    """Shared memory of one step of a warp: every lane's words, then its rows."""
    return (share.step_words + columns * row_words(arithmetic)) * 4 * LANES


def ring_bytes(rate: Rate, columns: int, arithmetic: str, stages: int) -> int:
    """Shared memory of a warp; `columns` is 0 where rows are not staged in it."""
    return stages * step_bytes(share_of(rate), columns, arithmetic)


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _copy_share(s_step: Int32, g_share: Int64, lane: Int32, share: Share) -> None:
    """Start the copies of this lane's words; each copy of a warp is contiguous in shared memory."""
    size = share.load_words * 4
    for piece in range(share.pieces):
        for first in range(0, share.words, share.load_words):
            g_load = g_share + (piece * share.rate.tile_bytes + first * 4)
            s_load = s_step + ((piece * share.words + first) * 4 * LANES) + lane * size
            gemm_primitives.copy_to_shared(s_load, g_load, size)


def _copy_rows(s_rows: Int32, g_rows: Any, step: Int32, lane: Int32, columns: int, arithmetic: str) -> None:
    """Start the copies of this lane's row of each product."""
    for column in range(columns):
        for first in range(0, row_words(arithmetic), _PIECE_WORDS):
            g_load = g_rows[column] + Int64(step * ROW_STEP_BYTES + 4 * first)
            place = column * row_words(arithmetic) + first
            gemm_primitives.copy_to_shared(s_rows + place * 4 * LANES + lane * (4 * _PIECE_WORDS), g_load, 16)


class _Words:
    """This lane's words of a step, read from shared memory where they are first asked for."""

    def __init__(self, s_step: Int32, lane: Int32, load_words: int) -> None:
        self._s_step, self._lane, self._load_words = s_step, lane, load_words
        self._loaded: dict[int, list[Uint32]] = {}

    def __getitem__(self, index: Any) -> Uint32:
        first, within = divmod(index[-1], self._load_words)
        if first not in self._loaded:
            count = self._load_words
            s_load = self._s_step + (first * count * 4 * LANES) + self._lane * (4 * count)
            self._loaded[first] = self._load(s_load, count)
        return self._loaded[first][within]

    def _load(self, address: Int32, count: int) -> list[Uint32]:
        return primitives.load_shared(address, count)


class _Rows(_Words):
    """This lane's rows of a step; where they are read again, one piece of each product's is kept at a time."""

    def __init__(self, s_rows: Int32, lane: Int32, words: int, *, rereads: bool) -> None:
        super().__init__(s_rows, lane, _PIECE_WORDS)
        self._words, self._rereads = words, rereads

    def __getitem__(self, index: Any) -> Uint32:
        column, piece = index[1], index[1] * self._words + index[2]
        if self._rereads and piece // _PIECE_WORDS not in self._loaded:
            for other in [other for other in self._loaded if other * _PIECE_WORDS // self._words == column]:
                del self._loaded[other]
        return super().__getitem__((piece,))

    def _load(self, address: Int32, count: int) -> list[Uint32]:
        return gemm_primitives.load_shared_again(address, count) if self._rereads else super()._load(address, count)


class _SharedRows:
    """This lane's rows of a step where the whole rows lie in shared memory."""

    def __init__(self, s_rows: Any, step: Int32) -> None:
        self._s_rows, self._step = s_rows, step
        self._loaded: dict[tuple[int, int], list[Uint32]] = {}

    def __getitem__(self, index: Any) -> Uint32:
        column, (piece, within) = index[1], divmod(index[2], _PIECE_WORDS)
        if (column, piece) not in self._loaded:
            s_load = self._s_rows[column] + self._step * ROW_STEP_BYTES + 4 * _PIECE_WORDS * piece
            self._loaded[column, piece] = primitives.load_shared(s_load, _PIECE_WORDS)
        return self._loaded[column, piece][within]


@cute.jit
def accumulate_from_ring(
    r_sums: cute.Tensor,
    g_strip: Int64,
    first: Int32,
    end: Int32,
    stride: Int32,
    lane: Int32,
    s_ring: Int32,
    s_table: Int32,
    find_rows: Constexpr,
    loop: Constexpr,
):
    """As `gemm_loop.accumulate`; `s_ring` is this warp's shared memory, free for its lanes when this returns."""
    share, stages, arithmetic = loop.share, loop.stages, loop.arithmetic
    g_step = loop.step_bytes
    staged = 0 if loop.rows_are_shared else loop.columns
    s_step = step_bytes(share, staged, arithmetic)
    s_words = share.step_words * 4 * LANES
    g_share = g_strip + Int64(lane_offset(share.rate, loop.n_tiles, lane))
    for stage in cutlass.range_constexpr(stages - 1):
        ahead = cutlass.min(first + stage * stride, end - 1)
        _copy_share(s_ring + stage * s_step, g_share + Int64(ahead) * g_step, lane, share)
    row_addresses = find_rows(loop.columns)
    for stage in cutlass.range_constexpr(stages - 1):
        ahead = cutlass.min(first + stage * stride, end - 1)
        _copy_rows(s_ring + stage * s_step + s_words, row_addresses, ahead, lane, staged, arithmetic)
        gemm_primitives.commit_copies()
    s_here = s_ring
    s_next = s_ring + (stages - 1) * s_step
    for step in cutlass.range(first, end, stride, unroll=1):
        ahead = step + (stages - 1) * stride
        if ahead < end:
            _copy_share(s_next, g_share + Int64(ahead) * g_step, lane, share)
            _copy_rows(s_next + s_words, row_addresses, ahead, lane, staged, arithmetic)
        gemm_primitives.commit_copies()
        gemm_primitives.wait_for_copies(stages - 1)
        words = _Words(s_here, lane, share.load_words)
        if cutlass.const_expr(loop.rows_are_shared):
            rows = _SharedRows(row_addresses, step)
        else:
            rows = _Rows(s_here + s_words, lane, row_words(arithmetic), rereads=loop.rereads)
        consume(r_sums, words, rows, 0, 0, share, lane, s_table, loop.codebook, loop.columns, arithmetic)
        s_next = s_here
        s_here = s_here + s_step
        if s_here == s_ring + stages * s_step:
            s_here = s_ring
    gemm_primitives.wait_for_copies(0)
    primitives.sync_warp()
