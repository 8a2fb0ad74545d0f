"""Owns what the launches of the many-token path are told.  It must not know what is computed from it.

A GEMM takes the same arguments whatever multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from trellis_kernels.cute.prefill_key import GemmKey

__all__ = ["GemmArguments", "ImageArguments", "ScheduleArguments", "SumArguments", "tile_tables"]


class GemmArguments(NamedTuple):
    """Arguments of the grouped GEMM: addresses, then numbers.

    words             codes of all experts
    first_image       image of the rows that the first linear multiplies, `last_image` of the last one's
    entries           row blocks, `entry_count` how many
    routes            route of each packed row
    out               rows, sums or image, by the epilogue
    first_scales      output vectors of the first linear, `last_scales` of the last one
    input_scales      the input vector of the linear after
    first_bias        and `last_bias`, 0 for none
    stash             where gate waits for up
    weights           of the routes
    law               the codebook's table
    image_rows        rows that an image has room for, `out_rows` those of the result
    scale_pitch       elements between the rows of a table, 0 where one row serves all; likewise the other pitches
    steps             panels of the input
    blocks            blocks of output channels
    top_k             routes of a token
    code_place        place of the first linear's codes in a row block
    factor            of every route weight
    thread_blocks     that are launched
    """

    words: Int64
    first_image: Int64
    last_image: Int64
    entries: Int64
    entry_count: Int64
    routes: Int64
    out: Int64
    first_scales: Int64
    last_scales: Int64
    input_scales: Int64
    first_bias: Int64
    last_bias: Int64
    stash: Int64
    weights: Int64
    law: Int64
    image_rows: Int32
    out_rows: Int32
    scale_pitch: Int32
    input_scale_pitch: Int32
    bias_pitch: Int32
    steps: Int32
    blocks: Int32
    top_k: Int32
    code_place: Int32
    factor: Float32
    thread_blocks: Int32


class ImageArguments(NamedTuple):
    """Arguments of the kernel that makes images: addresses, then numbers.

    x                 rows
    first_scales      input vectors of the first image, `last_scales` of the last one
    routes            route of each packed row, `block_experts` the expert of each block of `block_rows` of them
    packed_count      packed rows
    first_image       where the first image goes, `last_image` the last one
    first_slot        first packed row of the window, `slots` how many it has
    image_rows        rows that an image has room for
    channels          of a row of an image, `width` those that x has, `x_pitch` elements between its rows
    routes_per_row    routes that share a row of x
    route_count       routes in all
    scale_rows        rows of a table of scales, `scale_pitch` elements between them
    multiprocessors   of the device
    """

    x: Int64
    first_scales: Int64
    last_scales: Int64
    routes: Int64
    block_experts: Int64
    packed_count: Int64
    first_image: Int64
    last_image: Int64
    first_slot: Int32
    slots: Int32
    image_rows: Int32
    channels: Int32
    width: Int32
    x_pitch: Int32
    routes_per_row: Int32
    route_count: Int32
    scale_rows: Int32
    scale_pitch: Int32
    block_rows: Int32
    multiprocessors: Int32


class SumArguments(NamedTuple):
    """Arguments of the ordered sum: addresses, then numbers.

    rows              of the routes
    ids               experts of the routes, of `id_bytes` each
    weights           of the routes
    expert_map        local expert of each id, of `map_bytes` each; `map_length` ids, 0 for no map
    out               sums
    top_k             routes of a token
    experts           local experts
    padded            channels of a row, `channels` those of a sum
    factor            of every weight
    tokens            of the batch
    """

    rows: Int64
    ids: Int64
    weights: Int64
    expert_map: Int64
    out: Int64
    top_k: Int32
    experts: Int32
    map_length: Int32
    map_bytes: Int32
    padded: Int32
    channels: Int32
    id_bytes: Int32
    factor: Float32
    tokens: Int32


class ScheduleArguments(NamedTuple):
    """Arguments of the kernel that cuts row blocks: addresses, then numbers.

    counts                  routes of each expert, `offsets` where its segment begins
    first_descriptors       where the codes of each linear lie, with its rate; of up to three linears
    entries                 row blocks, `entry_count` how many
    experts                 how many there are
    first_slot, end_slot    the window
    first_half_bits         2K of the first linear in the experts that count, `last_half_bits` of the second
    """

    counts: Int64
    offsets: Int64
    first_descriptors: Int64
    last_descriptors: Int64
    third_descriptors: Int64
    entries: Int64
    entry_count: Int64
    experts: Int32
    first_slot: Int32
    end_slot: Int32
    first_half_bits: Int32
    last_half_bits: Int32


def tile_tables(args: GemmArguments, key: GemmKey) -> list[tuple[Int64, Int32]]:
    """Address and pitch of each table that a tile reads, in the order of its information."""
    scales = [(args.first_scales, args.scale_pitch), (args.last_scales, args.scale_pitch)][: key.linears]
    inputs = [(args.input_scales, args.input_scale_pitch)] if key.epilogue == "join" else []
    biases = [(args.first_bias, args.bias_pitch), (args.last_bias, args.bias_pitch)][: key.linears]
    return (scales + inputs + biases)[: key.tables]
