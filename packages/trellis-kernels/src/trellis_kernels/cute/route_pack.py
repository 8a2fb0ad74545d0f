"""Owns the kernels that pack routes by expert, and their launches.  It must not know weights.

Routes are cut into tiles.  Where one tile holds them all, one launch does everything; otherwise `count` writes each
tile's routes per expert, `offsets` turns those into first slots, and `place` writes the slots.  Each step touches a
route or a (tile, expert) pair once, so work is O(routes + experts * tiles) whatever the order asked for.

Stable order: a warp owns consecutive routes of its tile and takes 32 at a time.  A match over the warp ranks equal
experts, a counter of the warp and the expert holds what came before, and a prefix over the warps joins them; no two
threads race for a slot.  Unordered: an atomic counter of the tile hands out slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, Int64, Uint32

from trellis_kernels.arguments import check_topk_ids
from trellis_kernels.cute import words
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.argument_tuples import blank
from trellis_kernels.cute.launch import check_cuda
from trellis_kernels.cute.launches import launch
from trellis_kernels.cute.op_keys import PACK_STEPS, PackKey, pack_class, pack_tiles, pack_warps
from trellis_kernels.cute.values import load_index
from trellis_kernels.cute.window import LANES
from trellis_kernels.errors import KernelValueError
from trellis_kernels.routes import PackedRoutes, empty_routes

__all__ = ["build", "pack_into", "pack_routes"]

_SCAN_THREADS = 1024
_TILES_AT_ONCE = 8  # counts that a thread of `offsets` has in flight
_FEW_SLOTS = 1 << 14  # that one block may fill alone


class PackArguments(NamedTuple):
    """Arguments of every stage."""

    ids: Int64
    expert_map: Int64
    slots_out: Int64
    owners: Int64
    offsets: Int64
    counts: Int64
    packed_count: Int64
    work: Int64
    routes: Int32
    slots: Int32
    blocks: Int32
    id_bytes: Int32
    map_length: Int32
    map_bytes: Int32
    tiles: Int32
    num_experts: Int32
    block_rows: Int32


# ------------------------------------------------------------------------------------------------------ device
@cute.jit
def _expert_of(args: PackArguments, place: Int32) -> Int32:
    """Local expert of a route; -1 past the last route and for a route that is dropped."""
    expert = Int32(-1)
    if place < args.routes:
        expert = load_index(args.ids, place, args.id_bytes, Int32(-1))
        if args.map_length >= 0:
            mapped = Int32(-1)
            if (expert >= 0) & (expert < args.map_length):
                mapped = load_index(args.expert_map, expert, args.map_bytes, Int32(-1))
            expert = mapped
    if (expert < 0) | (expert >= args.num_experts):
        expert = Int32(-1)
    return expert


@cute.jit
def _clear(s_counters: Int32, count: Int32, thread: Int32, threads: Constexpr):
    for index in cutlass.range(thread, count, threads, unroll=1):
        words.store_shared(s_counters + index * 4, Int32(0))


@cute.jit
def _fill(g_slots: Int64, slots: Int32, value: Int32, first: Int32, stride: Int32):
    """Write one value to all slots; `first` of `stride` threads."""
    quads = slots // 4
    for quad in cutlass.range(first, quads, stride, unroll=4):
        words.store_four_global(g_slots + Int64(quad) * 16, value)
    if first < slots - quads * 4:
        words.store_global(g_slots + Int64(quads * 4 + first) * 4, value)


@cute.jit
def _rank(s_counter: Int32, expert: Int32, lane: Int32) -> Int32:
    """Routes of the same expert that this warp has met before this one; counts all of the warp's."""
    peers = cute.arch.match_sync(0xFFFFFFFF, expert, kind="any")
    before = Int32(cute.arch.popc(peers & ((Uint32(1) << Uint32(lane)) - Uint32(1))))
    base = Int32(0)
    if expert >= 0:
        base = words.load_shared(s_counter + expert * 4)
    words.sync_warp()  # all have read what the first one writes
    if (expert >= 0) & (before == 0):
        words.store_shared(s_counter + expert * 4, base + Int32(cute.arch.popc(peers)))
    words.sync_warp()
    return base + before


@cute.jit
def _scan_block(s_sums: Int32, value: Int32, thread: Int32, warps: Constexpr):
    """Sum of the values of the threads before this one, and of all threads; `s_sums` has a word for each warp."""
    lane = thread % LANES
    warp = thread // LANES
    inclusive = value
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            inclusive = inclusive + below
    if lane == LANES - 1:
        words.store_shared(s_sums + warp * 4, inclusive)
    words.sync_block()
    before = Int32(0)
    total = Int32(0)
    for index in cutlass.range_constexpr(warps):
        part = words.load_shared(s_sums + index * 4)
        if index < warp:
            before = before + part
        total = total + part
    words.sync_block()  # before the words are written again
    return before + inclusive - value, total


@cute.jit
def _own_blocks(args: PackArguments, first: Int32, stride: Int32):
    """Write the expert of each block, -1 past the last used one; offsets ascend, so a search finds it."""
    used = words.load_global(args.offsets + Int64(args.num_experts) * 4)
    for block in cutlass.range(first, args.blocks, stride, unroll=1):
        slot = block * args.block_rows
        owner = Int32(-1)
        if slot < used:
            low = Int32(0)
            high = args.num_experts
            while high - low > 1:
                middle = (low + high) // 2
                if words.load_global(args.offsets + Int64(middle) * 4) <= slot:
                    low = middle
                else:
                    high = middle
            owner = low
        words.store_global(args.owners + Int64(block) * 4, owner)


@cute.kernel
def _count_kernel(key: Constexpr, args: PackArguments):
    threads = pack_warps(key.max_experts) * LANES
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    s_counters = cute.arch.alloc_smem(Int32, key.max_experts, 16).toint()
    _clear(s_counters, args.num_experts, thread, threads)
    words.sync_block()
    experts = [_expert_of(args, tile * (threads * PACK_STEPS) + step * threads + thread) for step in range(PACK_STEPS)]
    for step in cutlass.range_constexpr(PACK_STEPS):
        if experts[step] >= 0:
            words.add_shared(s_counters + experts[step] * 4, Int32(1))
    words.sync_block()
    for expert in cutlass.range(thread, args.num_experts, threads, unroll=1):
        count = words.load_shared(s_counters + expert * 4)
        words.store_global(args.work + (Int64(tile) * Int64(args.num_experts) + Int64(expert)) * 4, count)
    _fill(args.slots_out, args.slots, args.routes, tile * threads + thread, tiles * threads)


@cute.kernel
def _offsets_kernel(_key: Constexpr, args: PackArguments):
    thread, _, _ = cute.arch.thread_idx()
    warps = _SCAN_THREADS // LANES
    s_sums = cute.arch.alloc_smem(Int32, warps, 16).toint()
    carry = Int32(0)
    for first in cutlass.range(0, args.num_experts, _SCAN_THREADS, unroll=1):
        expert = first + thread
        total = Int32(0)
        if expert < args.num_experts:
            for tile in cutlass.range(0, args.tiles, _TILES_AT_ONCE, unroll=1):
                g_tile = [
                    args.work
                    + (Int64(cutlass.min(tile + index, args.tiles - 1)) * Int64(args.num_experts) + Int64(expert)) * 4
                    for index in range(_TILES_AT_ONCE)
                ]
                found = [words.load_global(address) for address in g_tile]
                for index in cutlass.range_constexpr(_TILES_AT_ONCE):
                    if tile + index < args.tiles:
                        words.store_global(g_tile[index], total)
                        total = total + found[index]
        padded = (total + args.block_rows - 1) // args.block_rows * args.block_rows
        before, all_padded = _scan_block(s_sums, padded, thread, warps)
        if expert < args.num_experts:
            words.store_global(args.offsets + Int64(expert) * 4, carry + before)
            words.store_global(args.counts + Int64(expert) * 4, total)
        carry = carry + all_padded
    if thread == 0:
        words.store_global(args.offsets + Int64(args.num_experts) * 4, carry)
        words.store_global(args.packed_count, carry)


@cute.kernel
def _place_kernel(key: Constexpr, args: PackArguments):
    warps = pack_warps(key.max_experts)
    threads = warps * LANES
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    counters = warps if key.stable else 1
    s_counters = cute.arch.alloc_smem(Int32, counters * key.max_experts, 16).toint()
    s_mine = s_counters + warp * (key.max_experts * 4) if key.stable else s_counters
    first = tile * (threads * PACK_STEPS) + warp * (LANES * PACK_STEPS) + lane
    experts = [_expert_of(args, first + step * LANES) for step in range(PACK_STEPS)]
    ranks = [Int32(0) for _ in range(PACK_STEPS)]
    if cutlass.const_expr(key.stable):
        _clear(s_counters, counters * key.max_experts, thread, threads)
        words.sync_block()
        ranks = [_rank(s_mine, experts[step], lane) for step in range(PACK_STEPS)]
        words.sync_block()
    for expert in cutlass.range(thread, args.num_experts, threads, unroll=1):
        slot = words.load_global(args.offsets + Int64(expert) * 4) + words.load_global(
            args.work + (Int64(tile) * Int64(args.num_experts) + Int64(expert)) * 4
        )
        for index in cutlass.range_constexpr(counters):
            s_counter = s_counters + (index * key.max_experts + expert) * 4
            if cutlass.const_expr(key.stable):
                count = words.load_shared(s_counter)
                words.store_shared(s_counter, slot)
                slot = slot + count
            else:
                words.store_shared(s_counter, slot)
    words.sync_block()
    for step in cutlass.range_constexpr(PACK_STEPS):
        if experts[step] >= 0:
            s_counter = s_mine + experts[step] * 4
            slot = words.load_shared(s_counter) + ranks[step] if key.stable else words.add_shared(s_counter, Int32(1))
            words.store_global(args.slots_out + Int64(slot) * 4, first + step * LANES)
    _own_blocks(args, tile * threads + thread, tiles * threads)


@cute.kernel
def _all_kernel(key: Constexpr, args: PackArguments):
    warps = pack_warps(key.max_experts)
    threads = warps * LANES
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    s_counters = cute.arch.alloc_smem(Int32, warps * key.max_experts, 16).toint()
    s_sums = cute.arch.alloc_smem(Int32, warps, 16).toint()
    s_mine = s_counters + warp * (key.max_experts * 4)
    first = warp * (LANES * PACK_STEPS) + lane
    experts = [_expert_of(args, first + step * LANES) for step in range(PACK_STEPS)]
    _clear(s_counters, Int32(warps * key.max_experts), thread, threads)
    _fill(args.slots_out, args.slots, args.routes, thread, Int32(threads))
    words.sync_block()
    ranks = [_rank(s_mine, experts[step], lane) for step in range(PACK_STEPS)]
    words.sync_block()
    carry = Int32(0)
    for group in cutlass.range(0, args.num_experts, threads, unroll=1):
        expert = group + thread
        total = Int32(0)
        if expert < args.num_experts:
            for index in cutlass.range_constexpr(warps):
                total = total + words.load_shared(s_counters + (index * key.max_experts + expert) * 4)
        padded = (total + args.block_rows - 1) // args.block_rows * args.block_rows
        before, all_padded = _scan_block(s_sums, padded, thread, warps)
        if expert < args.num_experts:
            slot = carry + before
            words.store_global(args.offsets + Int64(expert) * 4, slot)
            words.store_global(args.counts + Int64(expert) * 4, total)
            for index in cutlass.range_constexpr(warps):
                s_counter = s_counters + (index * key.max_experts + expert) * 4
                count = words.load_shared(s_counter)
                words.store_shared(s_counter, slot)
                slot = slot + count
        carry = carry + all_padded
    if thread == 0:
        words.store_global(args.offsets + Int64(args.num_experts) * 4, carry)
        words.store_global(args.packed_count, carry)
    words.sync_block()
    for step in cutlass.range_constexpr(PACK_STEPS):
        if experts[step] >= 0:
            slot = words.load_shared(s_mine + experts[step] * 4) + ranks[step]
            words.store_global(args.slots_out + Int64(slot) * 4, first + step * LANES)
    _own_blocks(args, thread, Int32(threads))


# ------------------------------------------------------------------------------------------------------ host
_KERNELS = {"all": _all_kernel, "count": _count_kernel, "offsets": _offsets_kernel, "place": _place_kernel}


@cute.jit
def _host(args: PackArguments, key: Constexpr, stream: cuda.CUstream):
    tiles = args.tiles if cutlass.const_expr(key.stage in ("count", "place")) else 1
    threads = _SCAN_THREADS if key.stage == "offsets" else pack_warps(key.max_experts) * LANES
    _KERNELS[key.stage](key, args).launch(grid=[tiles, 1, 1], block=[threads, 1, 1], stream=stream)


def build(key: PackKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of `PackArguments` and a stream.
    """
    return cute.compile(_host, blank(PackArguments), key, cuda.CUstream(0), options=options)


def pack_routes(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_rows: int,
    expert_map: torch.Tensor | None = None,
    stable: bool = True,
    out: PackedRoutes | None = None,
) -> PackedRoutes:
    """Order routes by expert; see `trellis_kernels.ops.pack_routes`.

    Raises:
        KernelTypeError, KernelValueError: as the op.
        KernelUnsupportedError: if there are more experts than kernels have counters for; as every kernel.
        ColdKernelError: as every kernel.
    """
    check_cuda("topk_ids", topk_ids)
    check_topk_ids(topk_ids, expert_map)
    packed = empty_routes(topk_ids.numel(), num_experts, block_rows, topk_ids.device, out)
    counters = pack_tiles(topk_ids.numel(), num_experts) * num_experts
    work = torch.empty(counters, dtype=torch.int32, device=topk_ids.device)
    ids, mapped = topk_ids.contiguous(), None if expert_map is None else expert_map.contiguous()
    pack_into(ids, packed, work, expert_map=mapped, stable=stable)
    return packed


def pack_into(
    topk_ids: torch.Tensor,
    packed: PackedRoutes,
    work: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    stable: bool = True,
) -> None:
    """Order routes by expert in an arena, allocating nothing.

    Args:
        topk_ids: `[tokens, top_k] int32 or int64`, contiguous.
        packed: the arena, of enough slots, written whole.
        work: `[at least pack_tiles(routes, experts) * experts] int32`, counters of the tiles, with any content.
        expert_map: `[global experts] int32 or int64`, contiguous, or None.
        stable: whether routes of an expert keep their order.

    Raises:
        KernelValueError: if there are too few counters.
        KernelUnsupportedError, ColdKernelError: as `pack_routes`.
    """
    routes, slots = topk_ids.numel(), packed.route_indices.numel()
    num_experts = packed.expert_counts.numel()
    tiles = pack_tiles(routes, num_experts)
    if work.numel() < tiles * num_experts:
        raise KernelValueError(f"{tiles * num_experts} counters are needed, got {work.numel()}")
    stages = _stages(
        arch_of_device(topk_ids.device.index).name, pack_class(num_experts), stable, tiles == 1 and slots <= _FEW_SLOTS
    )
    for key in stages:
        launch(
            key,
            topk_ids.device,
            PackArguments,
            ids=topk_ids,
            expert_map=expert_map,
            slots_out=packed.route_indices,
            owners=packed.block_experts,
            offsets=packed.expert_offsets,
            counts=packed.expert_counts,
            packed_count=packed.packed_count,
            work=work,
            routes=routes,
            slots=slots,
            blocks=packed.block_experts.numel(),
            num_experts=num_experts,
            block_rows=packed.block_rows,
            id_bytes=topk_ids.element_size(),
            map_length=-1 if expert_map is None else expert_map.numel(),
            map_bytes=0 if expert_map is None else expert_map.element_size(),
            tiles=tiles,
        )


def _stages(arch: str, max_experts: int, stable: bool, one: bool) -> tuple[PackKey, ...]:
    """The keys of a packing's launches; what a stage does not read has one fixed value."""
    if one:
        return (PackKey(arch, "all", max_experts, True),)
    smallest = PackKey.EXPERT_CLASSES[0]
    return (
        PackKey(arch, "count", max_experts, True),
        PackKey(arch, "offsets", smallest, True),
        PackKey(arch, "place", max_experts, stable),
    )
