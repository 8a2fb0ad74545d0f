"""Holds the loads of a share to writing each byte of each tensor once, within a slot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prep.samples import extent_of, open_layer, random_layer, write_checkpoint
from trellis_prep import TrellisStaging, plan_preparation
from trellis_prep.devices import allocate
from trellis_prep.loads import lies_in_files, share_loads


@pytest.mark.parametrize("max_bytes", [180_000, 400_000, 1 << 26])
@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("gated", [True, False])
def test_each_byte_is_written_once(max_bytes: int, blocks: int, gated: bool) -> None:
    source, weights = random_layer(experts=5, biased=True, gated=gated)
    bounds = TrellisStaging(max_bytes=max_bytes if blocks else 1000)
    plan = plan_preparation(source, extent=extent_of(384, 0, blocks), staging=bounds)
    tensors = allocate(plan.layout, torch.device("cpu"))
    hits = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    slot = np.empty(plan.slot_bytes, dtype=np.uint8)
    total = 0
    for load in share_loads(plan, weights, hits):
        assert load.nbytes <= plan.slot_bytes
        place = 0
        for read in load.reads:
            assert read.first == place
            slot[:] = 0xA5
            read.fill(slot[read.first : read.first + read.nbytes])
            place += read.nbytes
        assert place == load.nbytes == sum(move.nbytes for move in load.moves)
        assert [move.first for move in load.moves] == list(np.cumsum([0] + [move.nbytes for move in load.moves[:-1]]))
        for move in load.moves:
            move.part.add_(1)
        total += load.nbytes
    assert total == plan.layout.total_bytes
    for name, tensor in hits.items():
        assert (tensor.view(-1).view(torch.uint8) == 1).all(), name


def test_codes_lie_in_files_or_do_not(tmp_path: Path) -> None:
    layer = random_layer()
    plan, empty = plan_preparation(layer[0]), plan_preparation(layer[0], extent=extent_of(384, 0, 0))
    assert not lies_in_files(plan, layer[1])
    checkpoint, _, weights = open_layer(write_checkpoint(tmp_path, layer))
    with checkpoint:
        assert lies_in_files(plan, weights)
        assert not lies_in_files(empty, weights), "there is nothing to read"


def test_codes_of_a_batch_go_in_one_copy_per_projection() -> None:
    source, weights = random_layer(experts=8)
    plan = plan_preparation(source, staging=TrellisStaging(max_experts=4))
    loads = list(share_loads(plan, weights, allocate(plan.layout, torch.device("cpu"))))
    codes = [load for load in loads if load.name.startswith("codes")]
    assert [load.name for load in codes] == ["codes of experts 0..4", "codes of experts 4..8"]
    assert [(len(load.reads), len(load.moves)) for load in codes] == [(12, 3), (12, 3)]


def test_tables_come_between_codes() -> None:
    source, weights = random_layer(experts=8)
    plan = plan_preparation(source, staging=TrellisStaging(max_experts=1))
    loads = share_loads(plan, weights, allocate(plan.layout, torch.device("cpu")))
    kinds = ["codes" if load.name.startswith("codes") else load.name.split(" ")[0] for load in loads]
    tables = ["descriptors", "input_scales", "intermediate_scales", "output_scales"]
    assert kinds == [kind for table in tables for kind in ("codes", "codes", table)]


def test_row_longer_than_a_slot_is_cut() -> None:
    source, weights = random_layer(hidden=1024)
    plan = plan_preparation(source, extent=extent_of(384, 3, 0), staging=TrellisStaging(max_bytes=400))
    names = [load.name for load in share_loads(plan, weights, allocate(plan.layout, torch.device("cpu")))]
    assert names.count("output_scales of rows 1..2") == -(-2048 // plan.slot_bytes)
