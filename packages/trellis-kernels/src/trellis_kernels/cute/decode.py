"""Owns the decode kernel, which writes tiles as a matrix in the rotated basis, and its launch.

It must not know codebooks or rates beyond what `codebooks` and `window` say, nor scales, signs or experts.

A warp decodes a strip of four neighbouring tiles of one tile row.  Each lane reads the few ring words that hold its
eight windows, cuts and decodes them, and then holds fragments whose rows are output channels.  The warp stores them
transposed to shared memory, in pieces of 16 bytes whose index is exclusive-ored with their row, so that neither the
store nor the read has a bank conflict, and then writes 16 bytes a lane: 128 consecutive bytes a row in fp16 and bf16,
256 in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr

from trellis_format.rates import TILE, Rate
from trellis_kernels.cute import compiler, primitives
from trellis_kernels.cute.archs import arch_of_device, get_arch
from trellis_kernels.cute.codebooks import get_device_codebook
from trellis_kernels.cute.keys import VALUE_BYTES, DecodeKey
from trellis_kernels.cute.table_codebooks import table_codebook
from trellis_kernels.cute.window import LANES, cut_windows, lane_geometry, plan_cuts
from trellis_kernels.errors import KernelTypeError, KernelValueError

__all__ = ["build", "decode", "decode_fragments", "load", "table_address"]

_WARPS = 4  # of a block; each has its own strip and its own part of shared memory
_STRIP = 4  # tiles of a strip
_PIECE = 16  # bytes that a lane moves at once
_ROW_BYTES = _STRIP * TILE * 2  # of a staged strip, which is fp16 whatever the output is
_ROW_PIECES = _ROW_BYTES // _PIECE
_STRIP_BYTES = TILE * _ROW_BYTES
_COMPACT_TABLE_BLOCKS, _FULL_TABLE_BLOCKS = 8, 3  # of a multiprocessor
_RESERVED_BYTES = 1024  # of a block's shared memory that the system keeps from sm_90 on
_MAX_GRID_X = 2**31 - 1
_MAX_GRID_Y = 65535  # which also keeps every offset inside a tile row below 2^31 bytes

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def _load_strip(g_row: Int64, first: Int32, n_tiles: Int32, lane: Int32, rate: Rate) -> list[list[Uint32]]:
    """This lane's ring words of each tile, counted backwards from the word where its bits end.

    All loads are issued before any is used.  Tiles past the end of the row repeat its last one and are never stored.
    """
    geometry = lane_geometry(rate)
    last_word = (geometry.lane_bits * (lane + 1) - 1) >> 5
    offsets = []
    for back in range(geometry.raw_words):
        word = last_word - back
        wrapped = word + ((word >> 31) & rate.tile_words32)  # the ring is closed: before word 0 comes the last
        offsets.append(wrapped * 4)
    tiles = [cutlass.min(first + index, n_tiles - 1) * rate.tile_bytes for index in range(_STRIP)]
    return [[primitives.load_global_word(g_row + Int64(tile + offset)) for offset in offsets] for tile in tiles]


def decode_fragments(
    raw: list[Uint32], lane: Int32, rate: Rate, codebook: str, s_table: Int32, table: str = "compact"
) -> list[Uint32]:
    """Ring words to four fp16 fragments: input rows {0, 8} + 2*(lane % 4), output columns lane // 4 + {0, 8}.

    Fragment p holds rows of half p % 2 and columns of half p // 2; its low half is the even row.

    Args:
        raw: the lane's ring words, counted backwards from the one where its bits end.
        lane: lane of the warp.
        rate: K.
        codebook: its name.
        s_table: address of the codebook's table in shared memory, if it has one.
        table: form of that table.
    """
    geometry = lane_geometry(rate)
    words: list[Uint32] = raw
    if not geometry.is_aligned:
        over = Uint32((0 - geometry.lane_bits * (lane + 1)) & 31)
        padded = [*raw, None]
        words = [
            primitives.funnel_right(raw[index], padded[index + 1], over) for index in range(geometry.aligned_words)
        ]
    states = cut_windows(
        words[: geometry.aligned_words],
        plan_cuts(geometry.lags),
        funnel_right=primitives.funnel_right,
        permute=primitives.permute_bytes,
    )
    tabled = table_codebook(codebook, table)
    if tabled is not None:
        pairs = [(states[2 * pair], states[2 * pair + 1]) for pair in range(4)]
        return [tabled.decode_pair(first, second, rate, s_table) for first, second in pairs]
    law = get_device_codebook(codebook)
    return law.finish_eight([law.hash(twice) for twice in states], lane)


def _stage_tile(s_strip: Int32, index: int, fragments: list[Uint32], lane: Int32, has_stmatrix: bool) -> None:
    """Store one tile of the strip to shared memory as fp16 rows of input channels.  `s_strip` is a multiple of 128."""
    if has_stmatrix:
        row_in_half = lane & 7
        row = row_in_half + ((lane >> 3) & 1) * 8
        piece = (lane >> 4) ^ row_in_half
        s_piece = (s_strip + row * _ROW_BYTES + piece * _PIECE) ^ (2 * index * _PIECE)
        primitives.store_matrices_transposed(s_piece, fragments)
        return
    row_in_half = lane >> 2
    for half, fragment in enumerate(fragments):
        piece = (2 * index + half // 2) ^ row_in_half
        row = row_in_half + 8 * (half % 2)
        s_word = s_strip + row * _ROW_BYTES + piece * _PIECE + (lane & 3) * 4
        primitives.store_transposed_by_shuffle(s_word, fragment)


def _write_strip(g_row: Int64, s_strip: Int32, first: Int32, n_tiles: Int32, lane: Int32, out_dtype: str) -> None:
    """Read the staged strip row by row and write it in the output dtype, 16 bytes a lane at a time."""
    value_bytes = VALUE_BYTES[out_dtype]
    staged_bytes = _PIECE * 2 // value_bytes  # that become 16 bytes of output
    lanes_per_row = _ROW_BYTES // staged_bytes
    rows_at_once = LANES // lanes_per_row
    s_column = (lane % lanes_per_row) * staged_bytes
    piece = s_column // _PIECE
    predicate = Boolean(first + piece // 2 < n_tiles)
    row_pitch = n_tiles * (TILE * value_bytes)
    for top in range(0, TILE, rows_at_once):
        row = lane // lanes_per_row + top
        s_address = s_strip + row * _ROW_BYTES + ((piece ^ (row & (_ROW_PIECES - 1))) * _PIECE + s_column % _PIECE)
        staged = primitives.load_shared(s_address, staged_bytes // 4)
        if out_dtype == "float32":
            staged = [word for pair in staged for word in primitives.f16x2_to_f32(pair)]
        elif out_dtype == "bfloat16":
            staged = [primitives.f16x2_to_bf16x2(pair) for pair in staged]
        g_offset = row * row_pitch + first * (TILE * value_bytes) + (lane % lanes_per_row) * _PIECE
        primitives.store_global_16_bytes(g_row + Int64(g_offset), staged, predicate)


def _decode_strip(
    g_codes: Int64,
    g_out: Int64,
    s_strip: Int32,
    first: Int32,
    n_tiles: Int32,
    lane: Int32,
    rate: Rate,
    codebook: str,
    out_dtype: str,
    has_stmatrix: bool,
    s_table: Int32,
    table: str,
) -> None:
    raw = _load_strip(g_codes, first, n_tiles, lane, rate)
    for index in range(_STRIP):
        fragments = decode_fragments(raw[index], lane, rate, codebook, s_table, table)
        _stage_tile(s_strip, index, fragments, lane, has_stmatrix)
    primitives.sync_warp()
    _write_strip(g_out, s_strip, first, n_tiles, lane, out_dtype)


@cute.kernel
def _decode_kernel(
    codes: cute.Pointer,
    out: cute.Pointer,
    g_table: Int64,
    tile_rows: Int32,
    n_tiles: Int32,
    half_bits: Constexpr,
    codebook: Constexpr,
    out_dtype: Constexpr,
    table: Constexpr,
    has_stmatrix: Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    first_row, first_group, _ = cute.arch.block_idx()
    rows_at_once, groups_at_once, _ = cute.arch.grid_dim()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    staging = cute.arch.alloc_smem(Uint32, _WARPS * _STRIP_BYTES // 4, _ROW_BYTES)
    s_strip = staging.toint() + warp * _STRIP_BYTES
    rate = Rate(half_bits)
    row_bytes = TILE * TILE * VALUE_BYTES[out_dtype]
    tabled = table_codebook(codebook, table)
    if cutlass.const_expr(tabled is None):
        first = (first_group * _WARPS + warp) * _STRIP
        if first < n_tiles:
            _decode_strip(
                codes.toint() + Int64(first_row) * Int64(n_tiles * rate.tile_bytes),
                out.toint() + Int64(first_row) * Int64(n_tiles * row_bytes),
                s_strip,
                first,
                n_tiles,
                lane,
                rate,
                codebook,
                out_dtype,
                has_stmatrix,
                Int32(0),
                table,
            )
    else:
        # filling the table costs as much as decoding a few strips, so blocks stay and take many
        words = tabled.words.size
        if cutlass.const_expr(table == "full"):
            s_table = cutlass.memory.SmemAllocator().allocate(words * 4, _PIECE).toint()
        else:
            s_table = cute.arch.alloc_smem(Uint32, words, _PIECE).toint()
        for piece in cutlass.range(thread, words * 4 // _PIECE, _WARPS * LANES, unroll=4):
            primitives.copy_to_shared(s_table + piece * _PIECE, g_table + Int64(piece * _PIECE))
        cute.arch.sync_threads()
        groups = (n_tiles + _WARPS * _STRIP - 1) // (_WARPS * _STRIP)
        for tile_row in cutlass.range(first_row, tile_rows, rows_at_once, unroll=1):
            for group in cutlass.range(first_group, groups, groups_at_once, unroll=1):
                first = (group * _WARPS + warp) * _STRIP
                if first < n_tiles:
                    _decode_strip(
                        codes.toint() + Int64(tile_row) * Int64(n_tiles * rate.tile_bytes),
                        out.toint() + Int64(tile_row) * Int64(n_tiles * row_bytes),
                        s_strip,
                        first,
                        n_tiles,
                        lane,
                        rate,
                        codebook,
                        out_dtype,
                        has_stmatrix,
                        s_table,
                        table,
                    )
                primitives.sync_warp()  # the strip is written out before the next one is staged over it


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _decode_host(
    codes: cute.Pointer,
    out: cute.Pointer,
    g_table: Int64,
    tile_rows: Int32,
    n_tiles: Int32,
    grid_rows: Int32,
    grid_groups: Int32,
    half_bits: Constexpr,
    codebook: Constexpr,
    out_dtype: Constexpr,
    table: Constexpr,
    has_stmatrix: Constexpr,
    stream: cuda.CUstream,
):
    _decode_kernel(codes, out, g_table, tile_rows, n_tiles, half_bits, codebook, out_dtype, table, has_stmatrix).launch(
        grid=[grid_rows, grid_groups, 1],
        block=[_WARPS * LANES, 1, 1],
        stream=stream,
    )


def _pointers(codes: int, out: int) -> tuple[Any, Any]:
    """Typed device pointers of two addresses, with the alignment that the kernel relies on."""
    gmem = cute.AddressSpace.gmem
    return make_ptr(Uint32, codes, gmem, assumed_align=4), make_ptr(Uint32, out, gmem, assumed_align=_PIECE)


def build(key: DecodeKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of (codes pointer, out pointer, table address, tile rows, n tiles, grid rows, grid groups, stream).
    """
    return cute.compile(
        _decode_host,
        *_pointers(0, 0),
        Int64(0),
        *(Int32(1) for _ in range(4)),
        key.half_bits,
        key.codebook,
        key.out_dtype,
        key.table,
        get_arch(key.arch).has_stmatrix,
        cuda.CUstream(0),
        options=options,
    )


def decode(codes: torch.Tensor, *, codebook: str, rate: Rate, table: str = "auto", out: torch.Tensor) -> torch.Tensor:
    """Decode tiles to the weight in the rotated basis, on the current stream of their device.

    Values are those of `trellis_format.tiles.decode_inner`, bit for bit in float16 and float32, and rounded to nearest
    even from them in bfloat16.

    Args:
        codes: `[..., k_tiles, n_tiles, 16*K] int16`, contiguous, on a CUDA device, 4-byte aligned; at most 1,048,560
            n tiles, and at most 2^31 - 1 tile rows over all leading axes.
        codebook: name of the codebook.
        rate: K.
        table: form of the codebook's table: `compact`, `full`, or `auto`, which is compact.
        out: `[..., 16*k_tiles, 16*n_tiles]` float16, bfloat16 or float32, contiguous, on the same device, 16-byte
            aligned.  Every element is written.

    Returns:
        `out`.

    Raises:
        KernelTypeError: if a dtype or a device is wrong.
        KernelValueError: if a shape, a stride or an alignment is wrong, there is no such table, or it does not fit the
            shared memory of a block.
        FormatValueError: if the codebook is unknown, or K not legal for it.
        KernelUnsupportedError: if the device's architecture is not one that kernels are compiled for.
        ColdKernelError: if the kernel is not ready and may not be compiled, frozen or under capture.
    """
    out_dtype = _check_tensors(codes, rate, out)
    n_tiles = codes.shape[-2]
    key = DecodeKey(
        arch=arch_of_device(codes.device.index).name,
        codebook=codebook,
        half_bits=rate.half_bits,
        out_dtype=out_dtype,
        table="compact" if table == "auto" else table,
    )
    _check_shared(key, codes.device.index)
    if codes.numel() == 0:
        return out
    tile_rows = codes.numel() // (n_tiles * rate.tile_words16)
    _check_grid(tile_rows, n_tiles)
    with torch.cuda.device(codes.device):
        kernel = compiler.ready(key)
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        kernel(
            *_pointers(codes.data_ptr(), out.data_ptr()),
            table_address(key.codebook, key.table, codes.device.index),
            tile_rows,
            n_tiles,
            *_grid(key, codes.device.index, tile_rows, n_tiles),
            stream,
        )
    return out


def load(key: DecodeKey) -> None:
    """Put the table of a key's codebook on the current device, so that a launch has nothing left to copy."""
    if table_codebook(key.codebook, key.table) is not None:
        table_address(key.codebook, key.table, torch.cuda.current_device())


def table_address(codebook: str, table: str, device: int) -> int:
    """Where a codebook's table lies on a device, put there on first use; 0 for one that is arithmetic alone."""
    if table_codebook(codebook, table) is None:
        return 0
    return _table_tensor(codebook, table, device).data_ptr()


@cache  # a table stays, because graphs that were captured with it may be replayed at any time
def _table_tensor(codebook: str, table: str, device: int) -> torch.Tensor:
    tabled = table_codebook(codebook, table)
    assert tabled is not None
    return torch.from_numpy(tabled.words.view(np.int32)).to(torch.device("cuda", device))


def _grid(key: DecodeKey, device: int, tile_rows: int, n_tiles: int) -> tuple[int, int]:
    """Blocks over tile rows and over groups of strips; with a table, no more than the device holds at once."""
    groups = -(-n_tiles // (_WARPS * _STRIP))
    if table_codebook(key.codebook, key.table) is None:
        return tile_rows, groups
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    blocks = processors * (_FULL_TABLE_BLOCKS if key.table == "full" else _COMPACT_TABLE_BLOCKS)
    rows = min(tile_rows, blocks)
    return rows, min(groups, max(blocks // rows, 1))


def _check_shared(key: DecodeKey, device: int) -> None:
    """Refuse a table that the device cannot hold; compact ones fit wherever kernels run."""
    wanted = key.dynamic_shared_bytes + _WARPS * _STRIP_BYTES + _RESERVED_BYTES
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if key.table == "full" and wanted > limit:
        raise KernelValueError(
            f"a full table takes {wanted} bytes of shared memory, a block of cuda:{device} has {limit}; take compact"
        )


def _check_tensors(codes: torch.Tensor, rate: Rate, out: torch.Tensor) -> str:
    """Check dtypes, devices, shapes, strides and alignments; returns the name of the output dtype."""
    if codes.device.type != "cuda" or out.device != codes.device:
        raise KernelTypeError(f"codes and out must be on one CUDA device, got {codes.device} and {out.device}")
    if codes.dtype != torch.int16:
        raise KernelTypeError(f"codes must be torch.int16, got {codes.dtype}")
    if out.dtype not in _DTYPES:
        raise KernelTypeError(f"out must be one of {', '.join(map(str, _DTYPES))}, got {out.dtype}")
    if codes.ndim < 3 or codes.shape[-1] != rate.tile_words16:
        raise KernelValueError(
            f"codes of K = {rate} must be [..., k_tiles, n_tiles, {rate.tile_words16}], got {list(codes.shape)}"
        )
    *batch, k_tiles, n_tiles, _ = codes.shape
    expected = [*batch, k_tiles * TILE, n_tiles * TILE]
    if list(out.shape) != expected:
        raise KernelValueError(f"out must be {expected} for codes {list(codes.shape)}, got {list(out.shape)}")
    for name, tensor, unit in (("codes", codes, 4), ("out", out, _PIECE)):
        if not tensor.is_contiguous():
            raise KernelValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        past = tensor.data_ptr() % unit
        if past:
            raise KernelValueError(f"{name} must start at a multiple of {unit} bytes, got {past} bytes past one")
    return _DTYPES[out.dtype]


def _check_grid(tile_rows: int, n_tiles: int) -> None:
    most_tiles = _MAX_GRID_Y * _WARPS * _STRIP
    if n_tiles > most_tiles:
        raise KernelValueError(
            f"decode writes at most {most_tiles} n tiles a row, got {n_tiles}; split codes by columns"
        )
    if tile_rows > _MAX_GRID_X:
        raise KernelValueError(
            f"decode writes at most {_MAX_GRID_X} tile rows, got {tile_rows}; split the leading axes"
        )
