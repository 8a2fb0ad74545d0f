"""Holds the cache to giving what preparation gives, from entries that are whole and its own."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from prep.cache_worker import prepare_cached
from prep.samples import (
    Layer,
    expected_tiles,
    extent_of,
    linears,
    open_layer,
    random_layer,
    write_checkpoint,
)
from trellis_prep import CacheWarning, PreparedCache, PreparedExperts, PrepValueError, TrellisStaging, prepare


def same(left: PreparedExperts, right: PreparedExperts) -> bool:
    return left.tensors.keys() == right.tensors.keys() and all(
        torch.equal(left.tensors[name], tensor) for name, tensor in right.tensors.items()
    )


@pytest.fixture
def cache(tmp_path: Path) -> PreparedCache:
    """A cache whose folder is not there yet."""
    return PreparedCache(tmp_path / "some" / "cache")


def counts(cache: PreparedCache) -> tuple[int, int, int]:
    return cache.hits, cache.misses, cache.damaged


def test_second_time_reads_the_entry_and_no_codes(tmp_path: Path, cache: PreparedCache) -> None:
    path = write_checkpoint(tmp_path / "model", random_layer(biased=True))
    expected = None
    for time in range(3):
        checkpoint, source, weights = open_layer(path)
        with checkpoint:
            before = checkpoint.bytes_read
            prepared = cache.prepare(source, weights, extent=extent_of(384, 1, 2), poison=True)
            read = checkpoint.bytes_read - before
        assert read == (0 if time else source.code_bytes(prepared.extent))
        expected = expected or prepare(source, weights, extent=extent_of(384, 1, 2))
        assert same(prepared, expected)
    assert counts(cache) == (2, 1, 0)
    assert len(list(cache.directory.iterdir())) == 1


def test_shares_and_layers_have_entries_of_their_own(cache: PreparedCache) -> None:
    for seed in range(2):
        layer = random_layer(seed=seed)
        for block in range(3):
            for _ in range(2):
                prepared = cache.prepare(*layer, extent=extent_of(384, block, 1))
                assert same(prepared, prepare(*layer, extent=extent_of(384, block, 1)))
    assert counts(cache) == (6, 6, 0)
    assert len(list(cache.directory.iterdir())) == 6


def test_loading_stays_within_the_bound(cache: PreparedCache) -> None:
    layer = random_layer(experts=6)
    bounds = TrellisStaging(max_bytes=400_000)
    cache.prepare(*layer, staging=bounds)
    seen: list[tuple[int, int]] = []
    prepared = cache.prepare(*layer, staging=bounds, progress=lambda done, total: seen.append((done, total)))
    steps = [done - before for (done, _), (before, _) in zip(seen, [(0, 0), *seen], strict=False)]
    assert max(steps) <= 200_000
    assert seen[-1] == (prepared.nbytes, prepared.nbytes)
    assert cache.hits == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_damaged_and_foreign_entries_are_made_again(cache: PreparedCache, damage: str) -> None:
    layer = random_layer()
    cache.prepare(*layer)
    path = cache.path_of(*layer)
    data = path.read_bytes()
    if damage == "foreign":
        other = random_layer(seed=9)
        cache.prepare(*other)
        os.replace(cache.path_of(*other), path)
    else:
        path.write_bytes(
            {"flip": data[:-9] + bytes([data[-9] ^ 64]) + data[-8:], "cut": data[:-1], "empty": b""}[damage]
        )
    with pytest.warns(CacheWarning, match="cached share is made again"):
        prepared = cache.prepare(*layer)
    assert same(prepared, prepare(*layer))
    assert cache.damaged == 1
    assert same(cache.prepare(*layer), prepared)
    assert cache.hits == 1


def test_changed_file_is_prepared_again(tmp_path: Path, cache: PreparedCache) -> None:
    path = write_checkpoint(tmp_path / "model", random_layer(rates=("4",)))
    for changed in range(2):
        if changed:
            with open(path / "model.safetensors", "r+b") as shard:
                shard.seek(-5, os.SEEK_END)
                byte = shard.read(1)
                shard.seek(-5, os.SEEK_END)
                shard.write(bytes([byte[0] ^ 0x10]))
        checkpoint, source, weights = open_layer(path)
        with checkpoint:
            assert same(cache.prepare(source, weights), prepare(source, weights))
    assert counts(cache) == (0, 2, 0)


def test_file_that_changes_meanwhile_is_not_cached(tmp_path: Path, cache: PreparedCache) -> None:
    path = write_checkpoint(tmp_path / "model", random_layer())
    checkpoint, source, weights = open_layer(path)
    with checkpoint:
        cache.prepare(source, weights, progress=lambda *_: os.utime(path / "model.safetensors", ns=(1, 1)))
    assert not cache.directory.exists()


def test_share_that_cannot_be_written_is_given_all_the_same(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = PreparedCache(blocked)
    layer = random_layer()
    with pytest.warns(CacheWarning, match="is not cached: .*safetensors"):
        prepared = cache.prepare(*layer)
    assert same(prepared, prepare(*layer))


def test_arguments_are_checked_as_without_a_cache(cache: PreparedCache) -> None:
    layer = random_layer()
    with pytest.raises(PrepValueError, match="insufficient"):
        cache.prepare(*layer, staging=TrellisStaging(max_bytes=1000))
    with pytest.raises(PrepValueError, match="codes are of"):
        cache.prepare(layer[0], random_layer(experts=2)[1])
    assert not cache.directory.exists()


def check(prepared: PreparedExperts, layer: Layer) -> None:
    for expert, projection in linears(layer[0]):
        tiles = prepared.tiles(expert, projection)[0].numpy()
        assert (tiles == expected_tiles(layer, prepared.extent, expert, projection)).all()


def test_processes_share_a_folder(tmp_path: Path) -> None:
    layer = random_layer(rates=("4",))
    write_checkpoint(tmp_path, layer)
    folder = tmp_path / "cache"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "trellis_prep", "safetensors.numpy", "pytest"])
    workers = [context.Process(target=prepare_cached, args=(tmp_path, folder, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    checkpoint, source, weights = open_layer(tmp_path)
    cache = PreparedCache(folder)
    with checkpoint:
        for block in range(3):
            check(cache.prepare(source, weights, extent=extent_of(384, block, 1)), layer)
    assert counts(cache) == (3, 0, 0)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.gpu
def test_gpu_share_is_cached_and_found(cache: PreparedCache) -> None:
    layer = random_layer(experts=6, biased=True)
    bounds = TrellisStaging(max_bytes=400_000)
    first = cache.prepare(*layer, device="cuda", staging=bounds)
    second = cache.prepare(*layer, device="cuda", staging=bounds, poison=True)
    assert same(first, second)
    assert counts(cache) == (1, 1, 0)
