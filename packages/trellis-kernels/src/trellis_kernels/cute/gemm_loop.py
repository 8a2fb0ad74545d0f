"""Owns the inner loop of the few-row GEMM: a warp multiplies one strip by the rows of one expert.

It must not know routing, rotations or what becomes of the sums.  The decoded weight is the A operand, its 16 rows being
output channels, and the token rows are the B operand, so nothing is wasted up to a product's rows; more rows repeat the
product with the same A.  Rows are read from global memory in the order 0, 1, 8, 9, 2, 3, 10, 11, ... inside every 16
channels, in which the two B registers of a product are neighbours.

exact: 8 rows a product.

unrounded: the same from values before the law's last rounding.  A mul1 weight is affine in the byte sum of its hash,
which as the bits of an fp16 is that many times 2^-24, so the offset meets the sum of a row's activations: products with
ones, a sixteenth of all.  A weight of 3inst or mcg is the sum of two fp16 values, which are two inputs of a product and
meet one activation twice.

bytes: likewise for mul1, so the four bytes of the hash are four of the 32 inputs of an integer product and the
activation, given to all four, is the other operand: no byte sum, no conversion and no join.  An activation is
256 hi + lo in two signed bytes, and the 8 columns of a product are 4 rows by {hi, lo}.  Every 16 channels of a row are
16 bytes of hi, then 16 of lo.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from trellis_format.rates import Rate
from trellis_kernels.cute import gemm_primitives, primitives
from trellis_kernels.cute.codebooks import DEVICE_CODEBOOKS, get_device_codebook
from trellis_kernels.cute.gemm_share import (
    STEP_CHANNELS,
    STEP_TILES,
    STRIP_CHANNELS,
    Share,
    cut_in_turn,
    hash_in_turn,
    share_of,
)
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS

__all__ = [
    "ROW_STEP_BYTES",
    "Piece",
    "accumulate",
    "consume",
    "finish_sums",
    "lane_offset",
    "multiply_cost",
    "pairs_of",
    "row_words",
    "sum_places",
]

ROW_STEP_BYTES = 2 * STEP_CHANNELS
"""Bytes of a step of one row, in either arithmetic."""


_ONES = 0x3C003C00  # fp16 pair


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def lane_offset(rate: Rate, n_tiles: int, lane: Int32) -> Int32:
    """Bytes from the first tile of a step's strip to this lane's first piece."""
    return (lane & 3) * (n_tiles * rate.tile_bytes) + (lane >> 2) * share_of(rate).lane_bytes


def load_share(r_words: Any, stage: int, g_share: Int64, share: Share) -> None:
    """Issue the loads of one step of this lane into a stage."""
    for piece in range(share.pieces):
        for first in range(0, share.words, share.load_words):
            g_load = g_share + (piece * share.rate.tile_bytes + first * 4)
            loaded = gemm_primitives.load_words(g_load, share.load_words, once=not share.is_wide)
            for index in range(share.load_words):
                r_words[stage, piece * share.words + first + index] = loaded[index]


def multiply_cost(codebook: str, arithmetic: str) -> float:
    """Of a shift by multiplication against a funnel shift.

    The pipe of permutes, shifts and logic is the bottleneck where nothing but hashes is multiplied: of a table, and of
    bytes.
    """
    return 0.9 if codebook in DEVICE_CODEBOOKS and arithmetic != "bytes" else 0.4


def row_words(arithmetic: str) -> int:
    """Words of a step of one product's B operand: 16 channels of a row in fp16, or one of the two bytes of each."""
    return 4 if arithmetic == "bytes" else 8


def sum_places(codebook: str, arithmetic: str) -> int:
    """Sums of a product and column that a lane keeps, four fp32 or int32 each.

    Those of its output channels; for unrounded products of a codebook with an offset also the rows' own sums.
    """
    return STRIP_CHANNELS // 16 + int(_has_offset(codebook, arithmetic))


def _has_offset(codebook: str, arithmetic: str) -> bool:
    return arithmetic == "unrounded" and get_device_codebook(codebook).unrounded_offset != 0.0


def finish_sums(r_sums: Any, columns: int, codebook: str, arithmetic: str) -> None:
    """Turn unrounded sums into sums of products with weights; others stay as they are."""
    if not _has_offset(codebook, arithmetic):
        return
    law = get_device_codebook(codebook)
    places = STRIP_CHANNELS // 16
    for column in range(columns):
        for z in range(4):
            shift = r_sums[places, column, z % 2] * Float32(law.unrounded_offset)
            for place in range(places):
                value = r_sums[place, column, z] + shift
                r_sums[place, column, z] = value * Float32(law.unrounded_scale)


def load_rows(
    r_rows: Any, stage: int, rows: Any, step: Int32, columns: int, arithmetic: str, *, are_shared: bool = False
) -> None:
    """Issue the loads of one step of the B operand of each product, from global or from shared memory."""
    for column in range(columns):
        for first in range(0, row_words(arithmetic), 4):
            at = step * ROW_STEP_BYTES + 4 * first
            if are_shared:
                loaded = primitives.load_shared(rows[column] + at, 4)
            else:
                loaded = gemm_primitives.load_words(rows[column] + Int64(at), 4, read_only=False)
            for index in range(4):
                r_rows[stage, column, first + index] = loaded[index]


class Piece(Sequence[Uint32]):
    """The words of one piece, the last one first, then the word before the piece on its ring; each read when asked for.

    That one is the last word of another lane: the other half of a tile, or the column before, column 7 coming before 0.
    """

    def __init__(self, read: Callable[[int], Uint32], share: Share, lane: Int32) -> None:
        self.lane = lane
        self._read, self._count = read, share.words
        self._before = (lane ^ 4) if share.is_wide else ((lane - 4) & 31)
        self._known: dict[int, Uint32] = {}

    def __len__(self) -> int:
        return self._count + 1

    def __getitem__(self, index: Any) -> Any:
        if index not in self._known:
            if index < self._count:
                self._known[index] = self._read(self._count - 1 - index)
            else:
                self._known[index] = gemm_primitives.pull_from_lane(self[0], self._before)
        return self._known[index]


def _multiply(word: Uint32, factor: int) -> Uint32:
    return primitives.multiply_add(word, factor, 0)


def states_of(piece: Piece, share: Share) -> Iterator[Uint32]:
    """The windows of one piece, each state twice in its register, each cut when it is asked for."""
    return cut_in_turn(
        piece,
        share.windows,
        funnel_right=primitives.funnel_right,
        multiply=_multiply,
        permute=primitives.permute_bytes,
    )


def hashes_of(piece: Piece, share: Share, codebook: str) -> Iterator[Uint32]:
    """The hash of every window of one piece, each made when it is asked for."""
    law = get_device_codebook(codebook)
    if not law.is_bound_by_logic:
        return map(law.hash, states_of(piece, share))
    return hash_in_turn(
        piece,
        share,
        funnel_right=primitives.funnel_right,
        multiply=_multiply,
        permute=primitives.permute_bytes,
        hash_twice=law.hash,
        hash_below=law.hash_below,
        hash_half=law.hash_half,
    )


def pairs_of(piece: Piece, share: Share, codebook: str, s_table: Int32) -> Iterator[Uint32]:
    """The fp16 pairs of neighbouring windows of one piece; `s_table` is the table's address, where there is one."""
    tabled = TABLE_CODEBOOKS.get(codebook)
    if tabled is not None:
        states = states_of(piece, share)
        return (tabled.decode_pair(first, next(states), share.rate, s_table) for first in states)
    law = get_device_codebook(codebook)
    hashes = hashes_of(piece, share, codebook)
    eights = iter(lambda: list(itertools.islice(hashes, 8)), [])
    return (pair for eight in eights for pair in law.finish_eight(eight, piece.lane))


def consume_exact(
    r_sums: Any,
    piece: Piece,
    r_rows: Any,
    stage: int,
    first_channel: int,
    share: Share,
    s_table: Int32,
    codebook: str,
    columns: int,
) -> None:
    """Decode one piece to fp16 fragments, four for each output channel, and add their products to the sums."""
    decoded = pairs_of(piece, share, codebook, s_table)
    for place in range(len(share.windows) // 8):
        channel, quarter = first_channel + place // 4, place % 4
        pairs = [next(decoded) for _ in range(4)]
        # pairs lie as (k, n), (k + 8, n), (k, n + 8), (k + 8, n + 8); the operand wants both n before the next k
        fragment = [pairs[0], pairs[2], pairs[1], pairs[3]]
        for column in range(columns):
            rows = [r_rows[stage, column, 2 * quarter + half] for half in range(2)]
            _add(gemm_primitives.multiply_halves, r_sums, (channel, column), fragment, rows)


def consume_unrounded(
    r_sums: Any,
    piece: Piece,
    r_rows: Any,
    stage: int,
    first_channel: int,
    share: Share,
    _s_table: Int32,
    codebook: str,
    columns: int,
) -> None:
    """Hash one piece to unrounded values and add their products, and the rows' own sums, to the sums.

    Where a weight is two values they are neighbours in the operand's input channels, and meet one activation twice.
    """
    law = get_device_codebook(codebook)
    in_turn = hashes_of(piece, share, codebook)
    for place in range(len(share.windows) // 8):
        channel, quarter = first_channel + place // 4, place % 4
        values = law.unrounded_eight([next(in_turn) for _ in range(8)], piece.lane)
        for column in range(columns):
            rows = [r_rows[stage, column, 2 * quarter + half] for half in range(2)]
            for index in range(len(values[0])):
                fragment = [values[pair][index] for pair in (0, 2, 1, 3)]
                operand = [primitives.repeat_half(word, index) for word in rows] if law.is_split else rows
                _add(gemm_primitives.multiply_halves, r_sums, (channel, column), fragment, operand)
        if channel == 0 and law.unrounded_offset:
            _add_rows(r_sums, r_rows, stage, quarter, columns)


def _add_rows(r_sums: Any, r_rows: Any, stage: int, quarter: int, columns: int) -> None:
    """Add rows of tokens to their own sums, as the weight that is one everywhere."""
    ones = [primitives.word_of(_ONES)] * 4
    for column in range(columns):
        rows = [r_rows[stage, column, 2 * quarter + half] for half in range(2)]
        _add(gemm_primitives.multiply_halves, r_sums, (STRIP_CHANNELS // 16, column), ones, rows)


def consume_bytes(
    r_sums: Any,
    piece: Piece,
    r_rows: Any,
    stage: int,
    first_channel: int,
    share: Share,
    _s_table: Int32,
    codebook: str,
    columns: int,
) -> None:
    """Hash the windows of one piece and add their byte products to the sums.

    A hash is one register of an operand of 16 output channels by 8 input channels, so the 8 hashes of a place are two
    fragments: input channels 2i and 2i + 1, then 2i + 8 and 2i + 9.
    """
    in_turn = hashes_of(piece, share, codebook)
    for place in range(len(share.windows) // 8):
        channel, quarter = first_channel + place // 4, place % 4
        hashes = [next(in_turn) for _ in range(8)]
        for half in range(2):
            fragment = [hashes[2 * half + index] for index in (0, 4, 1, 5)]
            for column in range(columns):
                four = r_rows[stage, column, quarter]
                rows = [primitives.permute_bytes(four, four, 0x1111 * (2 * half + index)) for index in range(2)]
                _add(gemm_primitives.multiply_bytes, r_sums, (channel, column), fragment, rows)


def _add(multiply: Any, r_sums: Any, place: tuple[int, int], fragment: list[Uint32], rows: list[Uint32]) -> None:
    sums = multiply(fragment, rows, [r_sums[(*place, z)] for z in range(4)])
    for z in range(4):
        r_sums[(*place, z)] = sums[z]


_CONSUME = {"exact": consume_exact, "unrounded": consume_unrounded, "bytes": consume_bytes}


def consume(
    r_sums: Any, r_words: Any, r_rows: Any, stage: int, row_stage: int, share: Share, lane: Int32, s_table: Int32,
    codebook: str, columns: int, arithmetic: str,
) -> None:  # fmt: skip
    """Decode a stage and add its products to the sums."""
    one = _CONSUME[arithmetic]
    for index in range(share.pieces):
        first = index * share.words
        piece = Piece(lambda word, first=first: r_words[stage, first + word], share, lane)
        one(r_sums, piece, r_rows, row_stage, index * share.columns, share, s_table, codebook, columns)


@dataclass(frozen=True)
class Loop:
    """What a warp's loop over steps is traced for.

    Args:
        rate: of the codes.
        codebook: their name.
        n_tiles: tiles of a tile row of the linear.
        columns: products with one decoded weight.
        stages: steps in flight.
        arithmetic: `exact`, `unrounded` or `bytes`.
        rows_are_shared: whether whole rows lie in shared memory.
        rereads: whether rows staged in a ring are read again for each output channel.
    """

    rate: Rate
    codebook: str
    n_tiles: int
    columns: int
    stages: int
    arithmetic: str
    rows_are_shared: bool = False
    rereads: bool = False

    @property
    def share(self) -> Share:
        """A lane's share of a step."""
        return share_of(self.rate, multiply_cost(self.codebook, self.arithmetic))

    @property
    def step_bytes(self) -> int:
        """From a step of the strip to the next one."""
        return STEP_TILES * self.n_tiles * self.rate.tile_bytes


@cute.jit
def accumulate(
    r_sums: cute.Tensor,
    g_strip: Int64,
    first: Int32,
    end: Int32,
    stride: Int32,
    lane: Int32,
    s_table: Int32,
    find_rows: Constexpr,
    loop: Constexpr,
):
    """Add steps first, first + stride, ... below end to the sums `[sum_places, columns, 4]`.

    `loop` is a `Loop`, `g_strip` the strip's first tile of step 0.  `find_rows(columns)` gives the address of this
    lane's row and 16 channels of step 0 for each column, in global memory or in shared; it is called once the first
    weights are on their way, so that it may wait.  `s_table` is as in `pairs_of`.
    """
    share, columns, stages, arithmetic = loop.share, loop.columns, loop.stages, loop.arithmetic
    g_share = g_strip + Int64(lane_offset(share.rate, loop.n_tiles, lane))
    # Rows come from the L1 after the first warp has read them; beyond one column registers are dearer than that wait.
    row_stages = stages if columns == 1 and not loop.rows_are_shared else 1
    r_words = cute.make_rmem_tensor(cute.make_layout((stages, share.step_words)), Uint32)
    r_rows = cute.make_rmem_tensor(cute.make_layout((row_stages, columns, row_words(arithmetic))), Uint32)
    for stage in cutlass.range_constexpr(stages):
        ahead = cutlass.min(first + stage * stride, end - 1)
        load_share(r_words, stage, g_share + Int64(ahead) * loop.step_bytes, share)
    rows = find_rows(columns)
    if cutlass.const_expr(row_stages > 1):
        for stage in cutlass.range_constexpr(stages):
            ahead = cutlass.min(first + stage * stride, end - 1)
            load_rows(r_rows, stage, rows, ahead, columns, arithmetic)
    rounds = (end - first + stride * stages - 1) // (stride * stages)
    for turn in cutlass.range(rounds, unroll=1):
        for stage in cutlass.range_constexpr(stages):
            step = first + (turn * stages + stage) * stride
            if step < end:
                if cutlass.const_expr(row_stages == 1):
                    load_rows(r_rows, 0, rows, step, columns, arithmetic, are_shared=loop.rows_are_shared)
                row_stage = stage if row_stages > 1 else 0
                consume(
                    r_sums, r_words, r_rows, stage, row_stage, share, lane, s_table, loop.codebook, columns, arithmetic
                )
            ahead = step + stages * stride
            if ahead < end:
                load_share(r_words, stage, g_share + Int64(ahead) * loop.step_bytes, share)
                if cutlass.const_expr(row_stages > 1):
                    load_rows(r_rows, stage, rows, ahead, columns, arithmetic)
