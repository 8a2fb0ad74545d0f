"""Holds the packing kernels to the torch backend, which is held to the law as a loop."""

from __future__ import annotations

import itertools

import pytest
import torch

from trellis_kernels import BLOCK_ROWS, KernelTypeError, KernelUnsupportedError, KernelValueError, PackedRoutes
from trellis_kernels.cpu.routes import pack_routes as truth
from trellis_kernels.routes import empty_routes

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.op_keys import pack_tiles
from trellis_kernels.cute.route_pack import pack_into, pack_routes

NAMES = ("route_indices", "block_experts", "packed_count", "expert_offsets", "expert_counts")


def random_ids(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Ids of which some are no expert; int64 ones also where only the low half would be."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator, dtype=dtype)
    if dtype == torch.int64 and ids.numel():
        ids.view(-1)[::11] += 1 << 32
    return ids


def check(found: PackedRoutes, wanted: PackedRoutes, stable: bool = True) -> None:
    """Every number of two packings; without order, segments as sets."""
    torch.cuda.synchronize()
    for name in NAMES[0 if stable else 1 :]:
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    if not stable:
        offsets, slots = wanted.expert_offsets.tolist(), wanted.route_indices.tolist()
        mine = found.route_indices.tolist()
        edges = [*offsets, len(slots)]
        for first, last in itertools.pairwise(edges):
            assert sorted(mine[first:last]) == sorted(slots[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [
        *((1, 1, 1), (16, 8, 128), (5, 3, 896), (256, 8, 100), (257, 8, 129)),
        *((511, 7, 1024), (4096, 16, 896), (300, 4, 1025), (1000, 9, 4096), (3000, 2, 2)),
    ],
)
def test_gpu_packing_is_the_torch_backends(tokens, top_k, num_experts, dtype, stable) -> None:
    ids = random_ids(tokens, top_k, num_experts, dtype)
    for block_rows in BLOCK_ROWS:
        found = pack_routes(ids.cuda(), num_experts=num_experts, block_rows=block_rows, stable=stable)
        check(found, truth(ids, num_experts=num_experts, block_rows=block_rows), stable)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [3, 900])
@pytest.mark.parametrize("length", [0, 1, 200, 300])
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_gpu_expert_maps(dtype: torch.dtype, tokens: int, length: int, map_dtype: torch.dtype) -> None:
    ids = random_ids(tokens, 5, 256, dtype)
    mapped = torch.randint(-2, 70, (length,), generator=torch.Generator().manual_seed(1), dtype=map_dtype)
    found = pack_routes(ids.cuda(), num_experts=64, block_rows=16, expert_map=mapped.cuda())
    check(found, truth(ids, num_experts=64, block_rows=16, expert_map=mapped))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 5000])
def test_gpu_packing_into_an_arena_allocates_nothing_and_refuses_too_few_counters(tokens: int) -> None:
    ids = random_ids(tokens, 4, 40, torch.int64)
    arena = empty_routes(tokens * 4, 40, 16, torch.device("cuda"))
    needed = pack_tiles(tokens * 4, 40) * 40
    work = torch.full((needed,), -7, dtype=torch.int32, device="cuda")
    on_device = ids.cuda()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    pack_into(on_device, arena, work)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    check(arena, truth(ids, num_experts=40, block_rows=16))
    with pytest.raises(KernelValueError, match=f"{needed} counters are needed, got {needed - 1}"):
        pack_into(on_device, arena, work[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("live", [0, 1, 17, 600, 1000])
def test_gpu_any_live_length_writes_the_whole_arena(live: int) -> None:
    arena = empty_routes(1000 * 4, 40, 16, torch.device("cuda"))
    ids = random_ids(live, 4, 40, torch.int32)
    wanted = truth(ids, num_experts=40, block_rows=16, out=empty_routes(1000 * 4, 40, 16, torch.device("cpu")))
    for name in NAMES:
        getattr(arena, name).fill_(-1234567)
    found = pack_routes(ids.cuda(), num_experts=40, block_rows=16, out=arena)
    assert found is arena
    check(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("id_", [-1, 0, 7])
@pytest.mark.parametrize("routes", [700, 5000])
def test_gpu_everything_to_one_expert_or_none(id_: int, routes: int) -> None:
    ids = torch.full((routes, 1), id_, dtype=torch.int32)
    for stable in (True, False):
        found = pack_routes(ids.cuda(), num_experts=8, block_rows=64, stable=stable)
        check(found, truth(ids, num_experts=8, block_rows=64), stable)


@pytest.mark.gpu
def test_gpu_stable_packing_repeats_bit_for_bit() -> None:
    ids = random_ids(4096, 8, 256, torch.int32).cuda()
    first = pack_routes(ids, num_experts=256, block_rows=64)
    for _ in range(100):
        again = pack_routes(ids, num_experts=256, block_rows=64)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 2000])
def test_gpu_replays_in_a_graph(tokens: int) -> None:
    ids = random_ids(tokens, 8, 64, torch.int32).cuda()
    arena = empty_routes(ids.numel(), 64, 16, ids.device)
    pack_routes(ids, num_experts=64, block_rows=16, out=arena)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack_routes(ids, num_experts=64, block_rows=16, out=arena)
    for seed in (1, 2):
        other = random_ids(tokens, 8, 64, torch.int32, seed)
        ids.copy_(other)
        graph.replay()
        check(arena, truth(other, num_experts=64, block_rows=16))


@pytest.mark.gpu
def test_gpu_more_experts_than_counters_are_refused() -> None:
    with pytest.raises(KernelUnsupportedError, match="at most 4096 experts, got 4097"):
        pack_routes(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), num_experts=4097, block_rows=8)


@pytest.mark.gpu
def test_gpu_small_arena_is_refused() -> None:
    arena = empty_routes(8, 4, 8, torch.device("cuda"))
    with pytest.raises(KernelValueError, match="9 routes need 37 slots, the arena has 36"):
        pack_routes(torch.zeros(9, 1, dtype=torch.int32, device="cuda"), num_experts=4, block_rows=8, out=arena)


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(KernelTypeError, match="topk_ids must be on a CUDA device, got cpu"):
        pack_routes(torch.zeros(1, 1, dtype=torch.int32), num_experts=1, block_rows=8)
