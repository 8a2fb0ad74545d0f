"""Holds the cache to giving what preparation gives, from entries that are whole and its own."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
from trellis_prep import (
    CacheWarning,
    PreparedCache,
    PreparedExperts,
    PrepReadError,
    PrepValueError,
    TrellisStaging,
    prepare,
)
from trellis_prep.cache_file import CacheFile


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


def test_refused_tensors_are_freed_before_others_are_allocated(
    cache: PreparedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer()
    cache.prepare(*layer)
    path = cache.path_of(*layer)
    path.write_bytes(path.read_bytes()[:-1] + b"!")  # found only by the digest, once everything was read
    empty, held = torch.empty, []

    def watched(shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.int32:
            assert all(storage.expired() for storage in held), "two copies of the codes at once"
        tensor = empty(shape, **options)
        if options.get("dtype") is torch.int32:
            held.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    with pytest.warns(CacheWarning, match="sha256"):
        cache.prepare(*layer)
    assert len(held) == 2


def test_entry_that_is_replaced_while_it_is_read_is_read_again(
    cache: PreparedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer()
    expected = cache.prepare(*layer)
    path = cache.path_of(*layer)
    loads, calls = CacheFile.loads, []

    def replaced_first(self: CacheFile, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:  # between the header and the data
            copy = path.with_name("copy")
            copy.write_bytes(path.read_bytes())
            os.replace(copy, path)
        return loads(self, *arguments)

    monkeypatch.setattr(CacheFile, "loads", replaced_first)
    assert same(cache.prepare(*layer), expected)
    assert (len(calls), counts(cache)) == (2, (1, 1, 0))


def test_entry_that_another_process_made_meanwhile_stays(cache: PreparedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer()
    other = PreparedCache(cache.directory)
    made: list[int] = []

    def faster(done: int, total: int) -> None:
        if done == total and not made:
            other.prepare(*layer)
            made.append(cache.path_of(*layer).stat().st_ino)

    cache.prepare(*layer, progress=faster)
    assert made == [cache.path_of(*layer).stat().st_ino]


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


def test_file_that_changes_meanwhile_is_not_cached(
    tmp_path: Path, cache: PreparedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "model", random_layer())
    preadv = os.preadv

    def touching(*arguments: Any) -> int:
        os.utime(path / "model.safetensors", ns=(1, 1))
        return preadv(*arguments)

    checkpoint, source, weights = open_layer(path)
    with checkpoint, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", touching)
        with pytest.raises(PrepReadError, match="the file changed while it was read"):
            cache.prepare(source, weights)
    checkpoint, source, weights = open_layer(path)

    def touch_at_the_end(done: int, total: int) -> None:
        if done == total:
            os.utime(path / "model.safetensors", ns=(2, 2))

    with checkpoint:
        cache.prepare(source, weights, progress=touch_at_the_end)
    assert not cache.directory.exists()


def test_share_that_cannot_be_written_is_given_all_the_same(
    cache: PreparedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trellis_prep.cache.write_cache_file", full)
    layer = random_layer()
    with pytest.warns(CacheWarning, match=r"is not cached: .*safetensors: No space left"):
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
