"""Owns the kernels that pack routes by expert, and their launches.  It must not know weights.

Routes are cut into tiles.  Where one tile holds them all, one launch does everything; otherwise `count` writes each
tile's routes per expert, `offsets` turns those into first slots, and `place` writes the slots.  Each step touches a
route or a (tile, expert) pair once, so work is O(routes + experts * tiles) whatever the order asked for.

Stable order: a warp owns consecutive routes of its tile and takes 32 at a time.  A match over the warp ranks equal
experts, a counter of the warp and the expert holds what came before, and a prefix over the warps joins them; no two
threads race for a slot.  Unordered: an atomic counter of the tile hands out slots.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, Int64, Uint32

from trellis_kernels.arguments import check_topk_ids
from trellis_kernels.cute import compiler, words
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.launch import check_cuda
from trellis_kernels.cute.op_keys import PACK_STEPS, PackKey, pack_class, pack_tiles, pack_warps
from trellis_kernels.cute.values import load_index
from trellis_kernels.cute.window import LANES
from trellis_kernels.errors import KernelValueError
from trellis_kernels.routes import PackedRoutes, empty_routes

__all__ = ["build", "pack_into", "pack_routes"]

_SCAN_THREADS = 1024
_TILES_AT_ONCE = 8  # counts that a thread of `offsets` has in flight
_FEW_SLOTS = 1 << 14  # that one block may fill alone


# ------------------------------------------------------------------------------------------------------ device
@cute.jit
def _expert_of(
    ids: Int64,
    expert_map: Int64,
    place: Int32,
    routes: Int32,
    id_bytes: Int32,
    map_length: Int32,
    map_bytes: Int32,
    num_experts: Int32,
) -> Int32:
    """Local expert of a route; -1 past the last route and for a route that is dropped."""
    expert = Int32(-1)
    if place < routes:
        expert = load_index(ids, place, id_bytes, Int32(-1))
        if map_length >= 0:
            mapped = Int32(-1)
            if (expert >= 0) & (expert < map_length):
                mapped = load_index(expert_map, expert, map_bytes, Int32(-1))
            expert = mapped
    if (expert < 0) | (expert >= num_experts):
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
def _own_blocks(
    g_owners: Int64, g_offsets: Int64, blocks: Int32, block_rows: Int32, num_experts: Int32, first: Int32, stride: Int32
):
    """Write the expert of each block, -1 past the last used one; offsets ascend, so a search finds it."""
    used = words.load_global(g_offsets + Int64(num_experts) * 4)
    for block in cutlass.range(first, blocks, stride, unroll=1):
        slot = block * block_rows
        owner = Int32(-1)
        if slot < used:
            low = Int32(0)
            high = num_experts
            while high - low > 1:
                middle = (low + high) // 2
                if words.load_global(g_offsets + Int64(middle) * 4) <= slot:
                    low = middle
                else:
                    high = middle
            owner = low
        words.store_global(g_owners + Int64(block) * 4, owner)


@cute.kernel
def _count_kernel(
    ids: Int64,
    expert_map: Int64,
    slots_out: Int64,
    work: Int64,
    routes: Int32,
    slots: Int32,
    num_experts: Int32,
    id_bytes: Int32,
    map_length: Int32,
    map_bytes: Int32,
    max_experts: Constexpr,
):
    threads = pack_warps(max_experts) * LANES
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    s_counters = cute.arch.alloc_smem(Int32, max_experts, 16).toint()
    _clear(s_counters, num_experts, thread, threads)
    words.sync_block()
    experts = [
        _expert_of(
            ids,
            expert_map,
            tile * (threads * PACK_STEPS) + step * threads + thread,
            routes,
            id_bytes,
            map_length,
            map_bytes,
            num_experts,
        )
        for step in range(PACK_STEPS)
    ]
    for step in cutlass.range_constexpr(PACK_STEPS):
        if experts[step] >= 0:
            words.add_shared(s_counters + experts[step] * 4, Int32(1))
    words.sync_block()
    for expert in cutlass.range(thread, num_experts, threads, unroll=1):
        count = words.load_shared(s_counters + expert * 4)
        words.store_global(work + (Int64(tile) * Int64(num_experts) + Int64(expert)) * 4, count)
    _fill(slots_out, slots, routes, tile * threads + thread, tiles * threads)


@cute.kernel
def _offsets_kernel(
    work: Int64,
    offsets: Int64,
    counts: Int64,
    packed_count: Int64,
    tiles: Int32,
    num_experts: Int32,
    block_rows: Int32,
):
    thread, _, _ = cute.arch.thread_idx()
    warps = _SCAN_THREADS // LANES
    s_sums = cute.arch.alloc_smem(Int32, warps, 16).toint()
    carry = Int32(0)
    for first in cutlass.range(0, num_experts, _SCAN_THREADS, unroll=1):
        expert = first + thread
        total = Int32(0)
        if expert < num_experts:
            for tile in cutlass.range(0, tiles, _TILES_AT_ONCE, unroll=1):
                g_tile = [
                    work + (Int64(cutlass.min(tile + index, tiles - 1)) * Int64(num_experts) + Int64(expert)) * 4
                    for index in range(_TILES_AT_ONCE)
                ]
                found = [words.load_global(address) for address in g_tile]
                for index in cutlass.range_constexpr(_TILES_AT_ONCE):
                    if tile + index < tiles:
                        words.store_global(g_tile[index], total)
                        total = total + found[index]
        padded = (total + block_rows - 1) // block_rows * block_rows
        before, all_padded = _scan_block(s_sums, padded, thread, warps)
        if expert < num_experts:
            words.store_global(offsets + Int64(expert) * 4, carry + before)
            words.store_global(counts + Int64(expert) * 4, total)
        carry = carry + all_padded
    if thread == 0:
        words.store_global(offsets + Int64(num_experts) * 4, carry)
        words.store_global(packed_count, carry)


@cute.kernel
def _place_kernel(
    ids: Int64,
    expert_map: Int64,
    slots_out: Int64,
    owners: Int64,
    offsets: Int64,
    work: Int64,
    routes: Int32,
    blocks: Int32,
    num_experts: Int32,
    block_rows: Int32,
    id_bytes: Int32,
    map_length: Int32,
    map_bytes: Int32,
    max_experts: Constexpr,
    stable: Constexpr,
):
    warps = pack_warps(max_experts)
    threads = warps * LANES
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    counters = warps if stable else 1
    s_counters = cute.arch.alloc_smem(Int32, counters * max_experts, 16).toint()
    s_mine = s_counters + warp * (max_experts * 4) if stable else s_counters
    first = tile * (threads * PACK_STEPS) + warp * (LANES * PACK_STEPS) + lane
    experts = [
        _expert_of(ids, expert_map, first + step * LANES, routes, id_bytes, map_length, map_bytes, num_experts)
        for step in range(PACK_STEPS)
    ]
    ranks = [Int32(0) for _ in range(PACK_STEPS)]
    if cutlass.const_expr(stable):
        _clear(s_counters, counters * max_experts, thread, threads)
        words.sync_block()
        ranks = [_rank(s_mine, experts[step], lane) for step in range(PACK_STEPS)]
        words.sync_block()
    for expert in cutlass.range(thread, num_experts, threads, unroll=1):
        slot = words.load_global(offsets + Int64(expert) * 4) + words.load_global(
            work + (Int64(tile) * Int64(num_experts) + Int64(expert)) * 4
        )
        for index in cutlass.range_constexpr(counters):
            s_counter = s_counters + (index * max_experts + expert) * 4
            if cutlass.const_expr(stable):
                count = words.load_shared(s_counter)
                words.store_shared(s_counter, slot)
                slot = slot + count
            else:
                words.store_shared(s_counter, slot)
    words.sync_block()
    for step in cutlass.range_constexpr(PACK_STEPS):
        if experts[step] >= 0:
            s_counter = s_mine + experts[step] * 4
            slot = words.load_shared(s_counter) + ranks[step] if stable else words.add_shared(s_counter, Int32(1))
            words.store_global(slots_out + Int64(slot) * 4, first + step * LANES)
    _own_blocks(owners, offsets, blocks, block_rows, num_experts, tile * threads + thread, tiles * threads)


@cute.kernel
def _all_kernel(
    ids: Int64,
    expert_map: Int64,
    slots_out: Int64,
    owners: Int64,
    offsets: Int64,
    counts: Int64,
    packed_count: Int64,
    routes: Int32,
    slots: Int32,
    blocks: Int32,
    num_experts: Int32,
    block_rows: Int32,
    id_bytes: Int32,
    map_length: Int32,
    map_bytes: Int32,
    max_experts: Constexpr,
):
    warps = pack_warps(max_experts)
    threads = warps * LANES
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % LANES
    warp = cute.arch.make_warp_uniform(thread // LANES)
    s_counters = cute.arch.alloc_smem(Int32, warps * max_experts, 16).toint()
    s_sums = cute.arch.alloc_smem(Int32, warps, 16).toint()
    s_mine = s_counters + warp * (max_experts * 4)
    first = warp * (LANES * PACK_STEPS) + lane
    experts = [
        _expert_of(ids, expert_map, first + step * LANES, routes, id_bytes, map_length, map_bytes, num_experts)
        for step in range(PACK_STEPS)
    ]
    _clear(s_counters, Int32(warps * max_experts), thread, threads)
    _fill(slots_out, slots, routes, thread, Int32(threads))
    words.sync_block()
    ranks = [_rank(s_mine, experts[step], lane) for step in range(PACK_STEPS)]
    words.sync_block()
    carry = Int32(0)
    for group in cutlass.range(0, num_experts, threads, unroll=1):
        expert = group + thread
        total = Int32(0)
        if expert < num_experts:
            for index in cutlass.range_constexpr(warps):
                total = total + words.load_shared(s_counters + (index * max_experts + expert) * 4)
        padded = (total + block_rows - 1) // block_rows * block_rows
        before, all_padded = _scan_block(s_sums, padded, thread, warps)
        if expert < num_experts:
            slot = carry + before
            words.store_global(offsets + Int64(expert) * 4, slot)
            words.store_global(counts + Int64(expert) * 4, total)
            for index in cutlass.range_constexpr(warps):
                s_counter = s_counters + (index * max_experts + expert) * 4
                count = words.load_shared(s_counter)
                words.store_shared(s_counter, slot)
                slot = slot + count
        carry = carry + all_padded
    if thread == 0:
        words.store_global(offsets + Int64(num_experts) * 4, carry)
        words.store_global(packed_count, carry)
    words.sync_block()
    for step in cutlass.range_constexpr(PACK_STEPS):
        if experts[step] >= 0:
            slot = words.load_shared(s_mine + experts[step] * 4) + ranks[step]
            words.store_global(slots_out + Int64(slot) * 4, first + step * LANES)
    _own_blocks(owners, offsets, blocks, block_rows, num_experts, thread, Int32(threads))


# ------------------------------------------------------------------------------------------------------ host
@cute.jit
def _host(
    ids: Int64,
    expert_map: Int64,
    slots_out: Int64,
    owners: Int64,
    offsets: Int64,
    counts: Int64,
    packed_count: Int64,
    work: Int64,
    routes: Int32,
    slots: Int32,
    blocks: Int32,
    num_experts: Int32,
    block_rows: Int32,
    id_bytes: Int32,
    map_length: Int32,
    map_bytes: Int32,
    tiles: Int32,
    stage: Constexpr,
    max_experts: Constexpr,
    stable: Constexpr,
    stream: cuda.CUstream,
):
    block = [pack_warps(max_experts) * LANES, 1, 1]
    if cutlass.const_expr(stage == "all"):
        _all_kernel(
            ids,
            expert_map,
            slots_out,
            owners,
            offsets,
            counts,
            packed_count,
            routes,
            slots,
            blocks,
            num_experts,
            block_rows,
            id_bytes,
            map_length,
            map_bytes,
            max_experts,
        ).launch(grid=[1, 1, 1], block=block, stream=stream)
    elif cutlass.const_expr(stage == "count"):
        _count_kernel(
            ids, expert_map, slots_out, work, routes, slots, num_experts, id_bytes, map_length, map_bytes, max_experts
        ).launch(grid=[tiles, 1, 1], block=block, stream=stream)
    elif cutlass.const_expr(stage == "offsets"):
        _offsets_kernel(work, offsets, counts, packed_count, tiles, num_experts, block_rows).launch(
            grid=[1, 1, 1], block=[_SCAN_THREADS, 1, 1], stream=stream
        )
    else:
        _place_kernel(
            ids,
            expert_map,
            slots_out,
            owners,
            offsets,
            work,
            routes,
            blocks,
            num_experts,
            block_rows,
            id_bytes,
            map_length,
            map_bytes,
            max_experts,
            stable,
        ).launch(grid=[tiles, 1, 1], block=block, stream=stream)


def build(key: PackKey, options: str) -> Any:
    """Compile the kernel of one key; touches no device and launches nothing.

    Args:
        key: what to compile.
        options: options of the DSL's compiler, target included.

    Returns:
        A callable of the runtime arguments of `_host`: addresses, then numbers, then the stream.
    """
    return cute.compile(
        _host,
        *(Int64(0) for _ in range(8)),
        *(Int32(1) for _ in range(9)),
        key.stage,
        key.max_experts,
        key.stable,
        cuda.CUstream(0),
        options=options,
    )


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
    with torch.cuda.device(topk_ids.device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        for key in stages:
            compiler.ready(key)(
                topk_ids.data_ptr(),
                0 if expert_map is None else expert_map.data_ptr(),
                packed.route_indices.data_ptr(),
                packed.block_experts.data_ptr(),
                packed.expert_offsets.data_ptr(),
                packed.expert_counts.data_ptr(),
                packed.packed_count.data_ptr(),
                work.data_ptr(),
                routes,
                slots,
                packed.block_experts.numel(),
                num_experts,
                packed.block_rows,
                topk_ids.element_size(),
                -1 if expert_map is None else expert_map.numel(),
                0 if expert_map is None else expert_map.element_size(),
                tiles,
                stream,
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
