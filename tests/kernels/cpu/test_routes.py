"""Holds the torch packing to the law stated as a loop, for all ids that can come."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import packed_by_loop
from trellis_kernels import BLOCK_ROWS, KernelTypeError, KernelValueError, PackedRoutes, route_capacity
from trellis_kernels.cpu.routes import pack_routes
from trellis_kernels.routes import empty_routes


def check(found: PackedRoutes, local: np.ndarray, num_experts: int, block_rows: int) -> None:
    """Every number of a packing against the loop, unused slots and blocks included."""
    wanted = packed_by_loop(local, num_experts, block_rows)
    slots = route_capacity(local.size, num_experts, block_rows)
    blocks = -(-slots // block_rows)
    assert found.block_rows == block_rows
    assert found.route_indices.tolist() == wanted["slots"] + [local.size] * (slots - len(wanted["slots"]))
    assert found.block_experts.tolist() == wanted["blocks"] + [-1] * (blocks - len(wanted["blocks"]))
    assert found.packed_count.tolist() == [len(wanted["slots"])]
    assert found.expert_offsets.tolist() == wanted["offsets"]
    assert found.expert_counts.tolist() == wanted["counts"]
    tensors = [value for value in vars(found).values() if isinstance(value, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


def localised(ids: np.ndarray, num_experts: int, expert_map: list[int] | None) -> np.ndarray:
    """Local expert of each id, -1 for none, one id at a time."""
    local = []
    for id_ in ids.reshape(-1).tolist():
        if expert_map is not None:
            id_ = expert_map[id_] if 0 <= id_ < len(expert_map) else -1
        local.append(id_ if 0 <= id_ < num_experts else -1)
    return np.array(local, dtype=np.int64)


@given(
    num_experts=st.integers(1, 12),
    tokens=st.integers(0, 30),
    top_k=st.integers(1, 4),
    block_rows=st.sampled_from(BLOCK_ROWS),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    expert_map=st.none() | st.lists(st.integers(-2, 14), max_size=16),
    seed=st.integers(0, 1000),
)
def test_packing_is_the_loops(num_experts, tokens, top_k, block_rows, dtype, expert_map, seed) -> None:
    ids = np.random.default_rng(seed).integers(-2, num_experts + 2, (tokens, top_k))
    mapped = None if expert_map is None else torch.tensor(expert_map, dtype=dtype)
    given_ids = torch.from_numpy(ids).to(dtype)
    found = pack_routes(given_ids, num_experts=num_experts, block_rows=block_rows, expert_map=mapped)
    check(found, localised(ids, num_experts, expert_map), num_experts, block_rows)


@pytest.mark.parametrize("stable", [True, False])
def test_an_arena_is_written_whole_for_any_live_length(stable: bool) -> None:
    arena = empty_routes(40, 5, 8, torch.device("cpu"))
    for tensor in (value for value in vars(arena).values() if isinstance(value, torch.Tensor)):
        tensor.fill_(-77)
    ids = np.random.default_rng(0).integers(-1, 5, (7, 3))
    found = pack_routes(torch.from_numpy(ids), num_experts=5, block_rows=8, stable=stable, out=arena)
    assert found is arena
    wanted = packed_by_loop(ids, 5, 8)
    used = len(wanted["slots"])
    assert arena.route_indices.tolist() == wanted["slots"] + [21] * (arena.route_indices.numel() - used)
    assert arena.block_experts.tolist() == wanted["blocks"] + [-1] * (arena.block_experts.numel() - used // 8)
    assert (arena.packed_count.tolist(), arena.expert_counts.tolist()) == ([used], wanted["counts"])
    assert arena.expert_offsets.tolist() == wanted["offsets"]


def test_ids_beyond_32_bits_are_no_expert() -> None:
    ids = torch.tensor([[1 << 32, 0], [1, -(1 << 32)], [(1 << 63) - 1, 1]])
    check(pack_routes(ids, num_experts=2, block_rows=8), np.array([-1, 0, 1, -1, -1, 1]), 2, 8)


def test_everything_to_one_expert() -> None:
    ids = torch.full((50, 3), 4, dtype=torch.int32)
    check(pack_routes(ids, num_experts=6, block_rows=16), np.full(150, 4), 6, 16)


def test_everything_dropped() -> None:
    found = pack_routes(torch.full((5, 2), -1), num_experts=3, block_rows=8)
    check(found, np.full(10, -1), 3, 8)
    assert not found.packed_count.any()


def test_ids_need_not_be_contiguous() -> None:
    ids = torch.arange(12, dtype=torch.int32).view(3, 4).T % 5
    check(pack_routes(ids, num_experts=5, block_rows=8), ids.numpy(), 5, 8)


IDS = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"topk_ids": IDS.float()}, KernelTypeError, "topk_ids must be torch.int32 or torch.int64"),
        ({"topk_ids": IDS[0]}, KernelValueError, r"topk_ids must be \[\*, \*\], got \[2\]"),
        ({"block_rows": 12}, KernelValueError, "block_rows 12"),
        ({"num_experts": 0}, KernelValueError, "0 experts"),
        ({"expert_map": IDS[0].short()}, KernelTypeError, "expert_map must be torch.int32 or torch.int64"),
        ({"expert_map": IDS}, KernelValueError, r"expert_map must be \[\*\], got \[2, 2\]"),
        ({"expert_map": IDS[0].to("meta")}, KernelTypeError, "expert_map must be on cpu"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], error: type[Exception], text: str) -> None:
    call = {"topk_ids": IDS, "num_experts": 4, "block_rows": 8} | change
    with pytest.raises(error, match=text):
        pack_routes(call.pop("topk_ids"), **call)
