"""Holds preparation to exact bytes, to its bound, and to reading nothing but its own share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from data_set import DataSet
from prep.samples import (
    MIXED,
    Layer,
    expected_tiles,
    extent_of,
    linears,
    open_layer,
    random_layer,
    write_checkpoint,
)
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_prep import (
    PreparedExperts,
    PrepValueError,
    TrellisStaging,
    even_extents,
    plan_layout,
    prepare,
)
from trellis_prep.measure import Meter

LAYERS = {
    "mixed": {},
    "one expert": {"experts": 1, "rates": ("2.5",), "shared": True, "joint": True},
    "no gate": {"experts": 4, "gated": False, "rates": ("4", "1")},
    "biased": {"experts": 2, "biased": True, "rates": ("3",)},
    "mcg": {"codebook": "mcg", "rates": ("1", "8", "6")},
}


def check_codes(prepared: PreparedExperts, layer: Layer, extent: TrellisExtent) -> None:
    """Hold every linear of a share to the slice of the layer."""
    for expert, projection in linears(layer[0]):
        tiles, rate = prepared.tiles(expert, projection)
        np.testing.assert_array_equal(tiles.cpu().numpy(), expected_tiles(layer, extent, expert, projection))
        assert rate == layer[0].rates.rate(expert, projection)


def largest_expert(layer: Layer, extent: TrellisExtent | None = None) -> int:
    """Bytes of the codes of the expert that takes most."""
    return max(layer[0].expert_code_bytes(expert, extent) for expert in range(layer[0].geometry.num_experts))


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    """A layer in memory, of each kind."""
    return random_layer(**LAYERS[request.param])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_are_slices_of_the_whole(layer: Layer, world: int) -> None:
    for extent in even_extents(384, world):
        check_codes(prepare(*layer, extent=extent, poison=True), layer, extent)


@pytest.mark.parametrize("slack", [0, 1, 1000])
def test_bound_of_one_expert_is_enough(layer: Layer, slack: int) -> None:
    bounds = TrellisStaging(max_bytes=largest_expert(layer) + slack)
    check_codes(prepare(*layer, staging=bounds, poison=True), layer, layer[0].extent)


@pytest.mark.parametrize("max_experts", [1, 2, 3])
def test_batches_of_few_experts_give_the_same(max_experts: int) -> None:
    layer = random_layer(experts=5)
    bounds = TrellisStaging(max_experts=max_experts)
    prepared = prepare(*layer, staging=bounds, poison=True)
    assert torch.equal(prepared.codes, prepare(*layer).codes)


def test_bound_below_one_expert_is_refused_before_anything_is_allocated(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = largest_expert(layer)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(PrepValueError, match=rf"{need - 1} bytes is insufficient: .* {need} bytes"):
        prepare(*layer, staging=TrellisStaging(max_bytes=need - 1))


def test_progress_ends_at_all_bytes() -> None:
    layer = random_layer(experts=5)
    seen: list[tuple[int, int]] = []
    staging = TrellisStaging(max_experts=2, readers=1)  # which go in order
    prepare(*layer, staging=staging, progress=lambda done, total: seen.append((done, total)))
    total = plan_layout(layer[0]).total_bytes
    assert seen[-1] == (total, total)
    assert {of for _, of in seen} == {total}
    done = [number for number, _ in seen]
    assert done == sorted(set(done))
    sizes = [layer[0].expert_code_bytes(expert) for expert in range(5)]
    moved = np.diff([0, *done]).tolist()
    assert moved[:2] == [sum(sizes[:2]), sum(sizes[2:4])]
    assert moved[3] == sizes[4], "a table comes between, so that it is filled while codes are read and copied"


def test_empty_share_is_prepared_without_codes(layer: Layer) -> None:
    prepared = prepare(*layer, extent=extent_of(384, 3, 0))
    assert prepared.codes.numel() == 0
    assert prepared.nbytes == prepared.layout.total_bytes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_file_is_read_once_and_only_where_the_share_lies(tmp_path: Path, world: int) -> None:
    layer = random_layer(rates=MIXED)
    path = write_checkpoint(tmp_path, layer)
    for extent in even_extents(384, world):
        checkpoint, source, weights = open_layer(path)
        with checkpoint:
            before = checkpoint.bytes_read
            prepared = prepare(source, weights, extent=extent)
            assert checkpoint.bytes_read - before == source.code_bytes(extent)
        check_codes(prepared, layer, extent)


def test_real_checkpoints_are_slices_of_themselves(checkpoint_path: Path) -> None:
    index = 1 if checkpoint_path.name.startswith("dsv3") else 0
    checkpoint, source, weights = open_layer(checkpoint_path, index)
    with checkpoint:
        blocks = source.geometry.padded_intermediate_size // 128
        for extent in even_extents(source.geometry.padded_intermediate_size, blocks):
            before = checkpoint.bytes_read
            prepared = prepare(source, weights, extent=extent, staging=TrellisStaging(max_experts=3), poison=True)
            assert checkpoint.bytes_read - before == plan_layout(source, extent).code_bytes
            check_codes(prepared, (source, weights), extent)


def test_file_cut_short_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, random_layer())
    checkpoint, source, weights = open_layer(path)
    shard = path / "model.safetensors"
    with checkpoint:
        os.truncate(shard, shard.stat().st_size - 5000)
        with pytest.raises(FormatValueError, match=r"model\.safetensors: .*truncated|changed"):
            prepare(source, weights)


def test_host_holds_the_ring_and_little_else(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, random_layer(experts=48, hidden=1024, intermediate=768, rates=("4",)))
    checkpoint, source, weights = open_layer(path)
    bounds = TrellisStaging(max_bytes=2 << 20)
    with checkpoint, Meter(torch.device("cpu")) as meter:
        prepared = prepare(source, weights, extent=extent_of(768, 0, 3), staging=bounds)
    assert meter.measured is not None
    above, _ = meter.measured.above(prepared.nbytes)
    if above is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert prepared.nbytes > 25 << 20
    assert above <= bounds.max_bytes + (6 << 20), "6 MiB for the interpreter's own"


@pytest.mark.gpu
def test_gpu_holds_the_same_bytes(layer: Layer) -> None:
    for extent in even_extents(384, 3):
        bounds = TrellisStaging(max_bytes=largest_expert(layer, extent))
        prepared = prepare(*layer, device="cuda", extent=extent, staging=bounds, poison=True)
        assert prepared.device.type == "cuda"
        check_codes(prepared, layer, extent)


@pytest.mark.gpu
def test_gpu_needs_no_memory_beyond_what_was_planned() -> None:
    layer = random_layer(experts=8, hidden=1024, intermediate=2048, rates=("4",))
    planned = plan_layout(layer[0]).total_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prepared = prepare(*layer, device="cuda")
    tensors = 6 + len(prepared.biases)
    assert torch.cuda.max_memory_allocated() - before <= planned + 512 * tensors  # torch rounds a tensor to 512 bytes


def test_data_set_has_checkpoints(data_set: DataSet) -> None:
    assert data_set.checkpoints, "tests that enumerate checkpoints would pass on none"
