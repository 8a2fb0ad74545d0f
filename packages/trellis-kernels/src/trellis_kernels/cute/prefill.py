"""Owns the launches of the many-token path: the grouped GEMM as an op, and a layer's steps around it.

It must not know plans, nor how routes were packed beyond `PackedRoutes`.

Rows are handled in packed order, so that those of one expert are contiguous and one bulk copy moves a tile of them:

    image (gather, scale, rotate) -> gate and up, joined -> image of the intermediate rows -> down -> rows by route

A *window* is a range of packed slots; images hold one window, so their bytes do not grow with tokens or experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trellis_format.activations import Activation
from trellis_kernels.bank import CodeBank
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.decode import table_address
from trellis_kernels.cute.launch import DTYPE_NAMES, check_cuda
from trellis_kernels.cute.launches import launch
from trellis_kernels.cute.op_keys import ReduceKey
from trellis_kernels.cute.prefill_arguments import GemmArguments, ImageArguments, ScheduleArguments, SumArguments
from trellis_kernels.cute.prefill_key import (
    ENGINES,
    ENTRY_CODES,
    ENTRY_WORDS,
    THREAD_BLOCKS_MOST,
    GemmKey,
    PrefillImageKey,
    PrefillReduceKey,
    PrefillScheduleKey,
    block_capacity,
    engine_for,
)
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, PANEL_CHANNELS, ROW_GROUP
from trellis_kernels.cute.reduce import ReduceArguments
from trellis_kernels.errors import KernelValueError
from trellis_kernels.routes import PackedRoutes

__all__ = [
    "Blocks",
    "Window",
    "add_rows",
    "clear_sums",
    "copy_sums",
    "down_rows",
    "grouped_gemm",
    "join_rows",
    "make_blocks",
    "make_image",
    "rate_pairs",
    "sum_rows",
    "whole_window",
]


@dataclass(frozen=True)
class Window:
    """A range of packed slots that one image holds.

    Attributes:
        first: its first slot, a multiple of 8.
        slots: its slots, a multiple of 8.
    """

    first: int
    slots: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """The row blocks of a window whose experts have one pair of rates.

    Attributes:
        half_bits: 2K of each linear that the blocks multiply by.
        entries: `[blocks, 8] int32`: expert, first slot, rows, first row of the image, and from `ENTRY_CODES` on the
            start of each linear's codes, in units of `CODE_UNIT`.
        count: `[1] int32`, blocks in use.
        code_place: place of the first linear's start in an entry.
    """

    half_bits: tuple[int, ...]
    entries: torch.Tensor
    count: torch.Tensor
    code_place: int = ENTRY_CODES


def whole_window(routes: PackedRoutes) -> Window:
    """The window of all slots."""
    return Window(0, -(-routes.route_indices.numel() // ROW_GROUP) * ROW_GROUP)


def rate_pairs(banks: tuple[CodeBank, ...]) -> tuple[tuple[int, ...], ...]:
    """The different rates of these linears over the experts, ascending."""
    return tuple(sorted({tuple(half for _, half in places) for places in zip(*(b.places for b in banks), strict=True)}))


def _arch(device: torch.device) -> str:
    return arch_of_device(device.index).name


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pitch(table: torch.Tensor | None) -> int:
    """Elements between the rows of a table; a table of one row serves every expert."""
    return 0 if table is None or table.shape[0] == 1 else table.stride(0)


def make_blocks(
    routes: PackedRoutes,
    banks: tuple[CodeBank, ...],
    half_bits: tuple[int, ...],
    window: Window,
    entries: torch.Tensor,
    count: torch.Tensor,
    *,
    engine: str,
) -> Blocks:
    """Cut the segments of a window into row blocks, on the current stream.

    Args:
        routes: packed routes.
        banks: the linears that the blocks will be multiplied by, at most 3.
        half_bits: their rates, of which the first two count; experts with others get no blocks.
        window: the slots.
        entries: `[block_capacity(slots, experts), 8] int32`, written as far as `count` says.
        count: `[1] int32`, written.
        engine: what will multiply them, one of `ENGINES`.

    Returns:
        The blocks, which hold `entries` and `count`.
    """
    experts = banks[0].num_experts
    block_rows = ENGINES[engine].block_rows
    most = block_capacity(window.slots, experts, block_rows)
    if entries.shape[0] < most:
        raise KernelValueError(
            f"{window.slots} slots of {experts} experts need {most} row blocks, got {entries.shape[0]}"
        )
    launch(
        PrefillScheduleKey(_arch(entries.device), block_rows),
        entries.device,
        ScheduleArguments,
        counts=routes.expert_counts,
        offsets=routes.expert_offsets,
        first_descriptors=banks[0].descriptors,
        last_descriptors=banks[min(1, len(banks) - 1)].descriptors,
        third_descriptors=banks[-1].descriptors,
        entries=entries,
        entry_count=count,
        experts=experts,
        first_slot=window.first,
        end_slot=window.first + window.slots,
        first_half_bits=half_bits[0],
        last_half_bits=half_bits[min(1, len(half_bits) - 1)],
    )
    return Blocks(half_bits, entries, count)


def make_image(
    x: torch.Tensor,
    routes: PackedRoutes,
    scales: tuple[torch.Tensor, ...],
    images: tuple[torch.Tensor, ...],
    window: Window,
    *,
    route_count: int,
    routes_per_row: int,
) -> None:
    """Gather rows by route, scale and rotate them, and write their images.

    Args:
        x: `[rows, width]` float16, bfloat16 or float32; route r takes row r // routes_per_row.
        routes: packed routes.
        scales: for each image `[1 or experts, channels] float16`; none writes the rows as they are.
        images: `[channels / 64, window slots, 64] float16` each, rows of live slots written.
        window: the slots.
        route_count: routes in all.
        routes_per_row: routes that share a row of x.
    """
    channels = images[0].shape[0] * PANEL_CHANNELS
    launch(
        PrefillImageKey(_arch(x.device), DTYPE_NAMES[x.dtype], len(scales)),
        x.device,
        ImageArguments,
        x=x,
        first_scales=scales[0] if scales else None,
        last_scales=scales[-1] if scales else None,
        routes=routes.route_indices,
        block_experts=routes.block_experts,
        packed_count=routes.packed_count,
        first_image=images[0],
        last_image=images[-1],
        first_slot=window.first,
        slots=window.slots,
        image_rows=images[0].shape[1],
        channels=channels,
        width=x.shape[1],
        x_pitch=x.stride(0),
        routes_per_row=routes_per_row,
        route_count=route_count,
        scale_rows=scales[0].shape[0] if scales else 1,
        scale_pitch=scales[0].stride(0) if scales else 0,
        block_rows=routes.block_rows,
        multiprocessors=torch.cuda.get_device_properties(x.device).multi_processor_count,
    )


def _gemm(
    key: GemmKey,
    banks: tuple[CodeBank, ...],
    images: tuple[torch.Tensor, ...],
    blocks: Blocks,
    routes: PackedRoutes,
    out: torch.Tensor,
    scales: tuple[torch.Tensor | None, ...],
    input_scales: torch.Tensor | None,
    biases: tuple[torch.Tensor | None, ...],
    *,
    stash: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    factor: float = 1.0,
) -> None:
    device = images[0].device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    launch(
        key,
        device,
        GemmArguments,
        words=banks[0].words,
        first_image=images[0],
        last_image=images[-1],
        entries=blocks.entries,
        entry_count=blocks.count,
        routes=routes.route_indices,
        out=out,
        first_scales=scales[0],
        last_scales=scales[-1],
        input_scales=input_scales,
        first_bias=biases[0],
        last_bias=biases[-1],
        stash=stash,
        weights=weights,
        law=table_address(key.codebook, "compact", device.index),
        image_rows=images[0].shape[1],
        out_rows=out.shape[1],
        scale_pitch=_pitch(scales[0]),
        input_scale_pitch=_pitch(input_scales),
        bias_pitch=_pitch(biases[0] if biases[0] is not None else biases[-1]),
        steps=banks[0].k // PANEL_CHANNELS,
        blocks=banks[0].n // BLOCK_CHANNELS,
        top_k=1 if weights is None else weights.shape[1],
        code_place=blocks.code_place,
        factor=factor,
        thread_blocks=key.resident * min(multiprocessors, THREAD_BLOCKS_MOST),
    )


def join_rows(
    banks: tuple[CodeBank, ...],
    images: tuple[torch.Tensor, ...],
    blocks: Blocks,
    routes: PackedRoutes,
    *,
    scales: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    input_scales: torch.Tensor,
    activation: Activation,
    stash: torch.Tensor | None,
    engine: str,
    out: torch.Tensor,
) -> None:
    """Gate and up in one pass, rotated out, activated, and rotated into the basis of down.

    Args:
        banks: gate and up, or up alone.
        images: one that both multiply, or one of each.
        blocks: row blocks for the rates of `banks`.
        routes: packed routes.
        scales: `[1 or experts, intermediate] float16` each, output vectors of `banks`.
        biases: as scales, or None.
        input_scales: `[1 or experts, intermediate] float16`, the input vector of down.
        activation: the law.
        stash: `[STASH_NBYTES] uint8`, written, where the law has a gate; else None.
        engine: as the blocks were made for.
        out: `[intermediate / 64, window slots, 64] float16`, rows of live slots written.
    """
    key = ENGINES[engine](
        arch=_arch(out.device),
        codebook=banks[0].codebook,
        half_bits=blocks.half_bits,
        epilogue="join",
        activation=activation,
        biased=tuple(bias is not None for bias in biases),
    )
    _gemm(key, banks, images, blocks, routes, out, scales, input_scales, biases, stash=stash)


def down_rows(
    bank: CodeBank,
    image: torch.Tensor,
    blocks: Blocks,
    routes: PackedRoutes,
    *,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    engine: str,
    out: torch.Tensor,
) -> None:
    """Down, rotated out, scaled and biased, to the row of each route.

    Args:
        bank: down.
        image: `[intermediate / 64, window slots, 64] float16`.
        blocks: row blocks for the rate of `bank`.
        routes: packed routes.
        scales: `[1 or experts, channels] float16`, output vectors.
        bias: as scales, or None.
        engine: as the blocks were made for.
        out: `[routes, channels]` float16 or float32, rows of the window's routes written.
    """
    key = ENGINES[engine](
        arch=_arch(out.device),
        codebook=bank.codebook,
        half_bits=blocks.half_bits,
        epilogue="down",
        biased=(bias is not None,),
        out_dtype=DTYPE_NAMES[out.dtype],
    )
    _gemm(key, (bank,), (image,), blocks, routes, out, (scales,), None, (bias,))


def add_rows(
    bank: CodeBank,
    image: torch.Tensor,
    blocks: Blocks,
    routes: PackedRoutes,
    *,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    factor: float,
    dtype: torch.dtype,
    engine: str,
    out: torch.Tensor,
) -> None:
    """Down, rotated out, scaled, biased and weighted, each term rounded and added to its token's row in any order.

    Args:
        bank: down.
        image: `[intermediate / 64, window slots, 64] float16`.
        blocks: row blocks for the rate of `bank`.
        routes: packed routes.
        scales: `[1 or experts, channels] float16`, output vectors.
        bias: as scales, or None.
        weights: `[tokens, top_k]`, float16, bfloat16 or float32, contiguous.
        factor: multiplies every weight.
        dtype: float16 or bfloat16, which terms are rounded to.
        engine: as the blocks were made for.
        out: `[tokens, channels] float32`, added to.
    """
    key = ENGINES[engine](
        arch=_arch(out.device),
        codebook=bank.codebook,
        half_bits=blocks.half_bits,
        epilogue="add",
        biased=(bias is not None,),
        out_dtype=DTYPE_NAMES[dtype],
        weight_dtype=DTYPE_NAMES[weights.dtype],
    )
    _gemm(key, (bank,), (image,), blocks, routes, out, (scales,), None, (bias,), weights=weights, factor=factor)


def clear_sums(sums: torch.Tensor, tokens: int) -> None:
    """Zero the first rows of `[at least tokens, channels] float32`, contiguous, channels a multiple of 8."""
    launch(
        ReduceKey(_arch(sums.device), "zero", "float32", "float32", True),
        sums.device,
        ReduceArguments,
        out=sums,
        channels=sums.shape[1],
        out_pitch=sums.stride(0),
        tokens=tokens,
    )


def copy_sums(sums: torch.Tensor, out: torch.Tensor) -> None:
    """Round the first rows and channels of `[tokens or more, padded channels] float32` to `[tokens, channels]`."""
    key = ReduceKey(_arch(sums.device), "copy", "float32", DTYPE_NAMES[out.dtype], True)
    launch(
        key,
        sums.device,
        ReduceArguments,
        rows=sums,
        out=out,
        channels=out.shape[1],
        row_pitch=sums.stride(0),
        out_pitch=out.stride(0),
        tokens=out.shape[0],
    )


def sum_rows(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None,
    factor: float,
    out: torch.Tensor,
) -> None:
    """Sum each token's weighted route rows in slot order, in fp32.

    Args:
        rows: `[tokens * top_k, padded channels] float16`, by flat route; rows of dropped routes hold anything.
        topk_ids: `[tokens, top_k] int32 or int64`, as they were packed.
        topk_weights: `[tokens, top_k]`, float16, bfloat16 or float32.
        num_experts: experts that the rank holds.
        expert_map: `[global experts] int32 or int64` that they were packed with, or None.
        factor: multiplies every weight.
        out: `[tokens, channels]`, float32, float16 or bfloat16, channels a multiple of 8; written whole.
    """
    tokens, top_k = topk_ids.shape
    if not tokens:
        return
    launch(
        PrefillReduceKey(_arch(rows.device), DTYPE_NAMES[topk_weights.dtype], DTYPE_NAMES[out.dtype]),
        rows.device,
        SumArguments,
        rows=rows,
        ids=topk_ids,
        weights=topk_weights,
        expert_map=expert_map,
        out=out,
        top_k=top_k,
        experts=num_experts,
        map_length=0 if expert_map is None else expert_map.numel(),
        map_bytes=0 if expert_map is None else expert_map.element_size(),
        padded=rows.shape[1],
        channels=out.shape[1],
        id_bytes=topk_ids.element_size(),
        factor=factor,
        tokens=tokens,
    )


def grouped_gemm(a: torch.Tensor, bank: CodeBank, routes: PackedRoutes, *, out: torch.Tensor) -> torch.Tensor:
    """out[r] = a[r] @ W[expert of r]; see `trellis_kernels.ops.grouped_gemm`."""
    check_cuda("a", a)
    check_dtype("a", a, torch.float16)
    check_dtype("out", out, torch.float32)
    check_shape("a", a, None, bank.k)
    check_shape("out", out, a.shape[0], bank.n)
    check_device(a.device, out=out, words=bank.words, route_indices=routes.route_indices)
    check_shape("expert_counts", routes.expert_counts, bank.num_experts)
    out.zero_()
    window = whole_window(routes)
    if not a.shape[0] or not window.slots:
        return out
    image = torch.empty(bank.k // PANEL_CHANNELS, window.slots, PANEL_CHANNELS, dtype=torch.float16, device=a.device)
    make_image(a, routes, (), (image,), window, route_count=a.shape[0], routes_per_row=1)
    engine = engine_for(_arch(a.device), a.shape[0] / bank.num_experts, bank.n)
    most = block_capacity(window.slots, bank.num_experts, ENGINES[engine].block_rows)
    entries = torch.empty(most, ENTRY_WORDS, dtype=torch.int32, device=a.device)
    count = torch.empty(1, dtype=torch.int32, device=a.device)
    for half_bits in rate_pairs((bank,)):
        blocks = make_blocks(routes, (bank,), half_bits, window, entries, count, engine=engine)
        key = ENGINES[engine](_arch(a.device), bank.codebook, half_bits)
        _gemm(key, (bank,), (image,), blocks, routes, out, (None,), None, (None,))
    return out
