"""Holds the planned reads of batches to reads one by one, for each container, share and bound."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from format.files.test_uring import needs_ring
from prep.samples import Layer, extent_of, open_layer, random_layer, write_checkpoint
from trellis_format.files.uring import Ring
from trellis_format.native.layer import trellis_from_native
from trellis_format.native.manifest import read_manifest
from trellis_format.native.reader import read_layer
from trellis_format.native.writer import plan_head, write_layer, write_manifest
from trellis_prep import PrepReadError, TrellisStaging, plan_preparation, staging
from trellis_prep import plan as plan_module
from trellis_prep.code_loads import CodeLoads
from trellis_prep.plan import PreparationPlan


@contextmanager
def opened(folder: Path, layer: Layer, container: str) -> Iterator[Layer]:
    """The layer in files of a container."""
    if container == "exl3":
        checkpoint, source, weights = open_layer(write_checkpoint(folder, layer))
        with checkpoint:
            yield source, weights
        return
    head = plan_head({0: layer[0]})
    write_manifest(folder, head, {0: write_layer(folder, head, 0, *layer)})
    yield trellis_from_native(read_layer(folder, read_manifest(folder), 0, hold_codes=False))


def loads_of(layer: Layer, plan: PreparationPlan) -> CodeLoads:
    return CodeLoads(plan, layer[1], torch.zeros(plan.layout.code_bytes, dtype=torch.uint8))


@needs_ring
@pytest.mark.parametrize("container", ["exl3", "native"])
@pytest.mark.parametrize("max_bytes", [150_000, 250_000, 1 << 26])
@pytest.mark.parametrize(("first", "blocks"), [(0, 3), (0, 1), (1, 2)])
@pytest.mark.parametrize("rates", [("3",), ("1", "8", "2.5")])
@pytest.mark.parametrize("by_projection", [False, True])
def test_planned_reads_are_those_made_one_by_one(
    tmp_path: Path,
    container: str,
    max_bytes: int,
    first: int,
    blocks: int,
    rates: tuple[str, ...],
    by_projection: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = random_layer(experts=7, rates=rates)
    bounds = TrellisStaging(max_experts=2, max_bytes=max_bytes)
    if by_projection:
        monkeypatch.setattr(staging, "LARGE_LINEAR", 1)
        monkeypatch.setattr(staging, "LEAST_SLOTS", 2)
        monkeypatch.setattr(plan_module, "_kernel", lambda *_: (0, True))
        monkeypatch.setattr(plan_module, "LEAST_POLLED_SLOT", 1)
    with opened(tmp_path, made, container) as layer:
        plan = plan_preparation(layer[0], extent=extent_of(384, first, blocks), staging=bounds)
        loads, ring = loads_of(layer, plan), Ring()
        buffers = [np.empty(plan.slot_bytes, dtype=np.uint8) for _ in range(2)]
        assert len(plan.batches) > 3
        if by_projection and max_bytes > 200_000:
            assert all(len(load.moves) == 1 for load in loads)
        for number, load in enumerate(loads):
            expected, out = np.empty(load.nbytes, dtype=np.uint8), buffers[number % 2]
            for read in load.reads:
                read.fill(expected[read.first : read.first + read.nbytes])
            assert sum(move.nbytes for move in load.moves) == load.nbytes
            out.fill(0xA5)
            reads = load.planned(out.ctypes.data)
            assert reads is not None
            assert np.array_equal(ring.run(reads.entries), reads.sizes)
            assert out[: load.nbytes].tobytes() == expected.tobytes()
            assert (out[load.nbytes :] == 0xA5).all()


def test_codes_in_memory_have_no_plan() -> None:
    layer = random_layer()
    loads = loads_of(layer, plan_preparation(layer[0]))
    assert not loads.in_files
    assert [load.planned(0) for load in loads] == [None]


def test_what_was_short_or_changed_is_read_again(tmp_path: Path) -> None:
    made = random_layer(experts=3)
    with opened(tmp_path, made, "exl3") as layer:
        plan = plan_preparation(layer[0])
        (load,) = loads_of(layer, plan)
        reader = layer[1].codes[0][0].reader
        before = reader.bytes_read
        assert load.unread(set()) == []
        assert reader.bytes_read - before == plan.layout.code_bytes
        again = load.unread({1, 4})
        assert [read.first for read in again] == [load.reads[index].first for index in (1, 4)]
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        again = load.unread(set())
        assert len(again) == 9
        with pytest.raises(PrepReadError, match=r"expert 0 gate: the file changed while it was read"):
            again[0].fill(np.empty(again[0].nbytes, dtype=np.uint8))


def test_files_that_cannot_be_opened_are_left_to_the_reads(tmp_path: Path) -> None:
    with opened(tmp_path, random_layer(), "exl3") as layer:
        layer[1].codes[0][0].reader.close()
        os.unlink(tmp_path / "model.safetensors")
        (load,) = loads_of(layer, plan_preparation(layer[0]))
        assert load.planned(0) is None
        with pytest.raises(PrepReadError, match=r"expert 0 gate: cannot be opened"):
            load.reads[0].fill(np.empty(load.reads[0].nbytes, dtype=np.uint8))
