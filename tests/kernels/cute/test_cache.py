"""Holds the cache of compiled kernels to its promises: content-addressed, whole or absent, bounded, private."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trellis_kernels.cute import cache as module
from trellis_kernels.cute import compiler
from trellis_kernels.cute.cache import ObjectCache
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.errors import KernelValueError

KEY = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=5, out_dtype="bfloat16")
OTHER = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=4, out_dtype="bfloat16")


class FakeKernel:
    """A compiled kernel of some bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def dump_to_object(self, symbol: str) -> bytes:
        return symbol.encode() + self.content


@pytest.fixture
def fake_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are read back as bytes, without the DSL."""
    monkeypatch.setattr(module, "_preload_runtime", lambda: None)
    monkeypatch.setattr(module, "_load_object", lambda path, symbol: (path.read_bytes(), symbol))


def test_a_kernel_comes_back_under_its_own_name(fake_objects: None, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    assert cache.load(KEY) is None
    path = cache.store(KEY, FakeKernel(b"code"))
    content, symbol = cache.load(KEY)
    assert content.startswith(symbol.encode() + b"code")
    assert cache.load(OTHER) is None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\0" + data[1:], lambda data: b""])
def test_a_damaged_file_is_a_miss_and_goes(fake_objects: None, tmp_path: Path, damage) -> None:
    cache = ObjectCache(tmp_path)
    path = cache.store(KEY, FakeKernel(b"code"))
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load(KEY) is None
    assert not path.exists()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (module, "source_digest", lambda: "other sources"),
        (module, "version", lambda package: "9.9"),
        (module.platform, "machine", lambda: "other host"),
        (module.sys, "version_info", (3, 99, 0)),
    ],
)
def test_all_that_decides_the_content_is_in_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: object, name: str, value: object
) -> None:
    cache = ObjectCache(tmp_path)
    before = {cache.path(KEY), cache.path(OTHER)}
    monkeypatch.setattr(where, name, value)
    assert not {cache.path(KEY), cache.path(OTHER)} & before
    assert len(before) == 2


def test_sources_are_those_of_generators() -> None:
    assert len(module.source_digest()) == 64
    assert module.source_digest() == module.source_digest()


def test_the_least_recently_used_go_first(fake_objects: None, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, max_bytes=3500)
    keys = [DecodeKey("sm_90a", "mcg", half_bits, "float16") for half_bits in (2, 4, 6, 8)]
    for age, key in enumerate(keys[:3]):
        path = cache.store(key, FakeKernel(bytes(1000)))
        os.utime(path, (1000 + age, 1000 + age))
    assert cache.load(keys[0]) is not None  # used again, so no longer the oldest
    cache.store(keys[3], FakeKernel(bytes(1000)))
    assert [cache.load(key) is not None for key in keys] == [True, False, True, True]
    assert cache.info().size_bytes <= 3500


def test_one_kernel_beyond_the_bound_still_stays(fake_objects: None, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, max_bytes=10)
    cache.store(KEY, FakeKernel(bytes(1000)))
    assert cache.load(KEY) is not None


def test_info_and_clear_count_kernels(fake_objects: None, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "deep" / "folder")
    (cache.folder / "notes.txt").write_text("not a kernel")
    for key in (KEY, OTHER):
        cache.store(key, FakeKernel(b"code"))
    assert cache.info().kernels == 2
    assert cache.clear() == 2
    assert (cache.info().kernels, cache.info().size_bytes) == (0, 0)
    assert (cache.folder / "notes.txt").exists()


def test_a_failed_write_leaves_nothing(fake_objects: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    cache = ObjectCache(tmp_path)
    monkeypatch.setattr(module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.store(KEY, FakeKernel(b"code"))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(KernelValueError, match=r"writable by nobody else.*mode 777"):
        ObjectCache(tmp_path)


def test_a_bound_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(KernelValueError, match="above 0 bytes, got 0"):
        ObjectCache(tmp_path, max_bytes=0)


def test_a_default_folder_that_cannot_be_used_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "file")
    module.default_cache.cache_clear()
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept"):
        assert module.default_cache() is None
    module.default_cache.cache_clear()


@pytest.fixture
def real_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCache:
    """A cache that the compiler uses, with an empty table of kernels."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    cache = ObjectCache(tmp_path)
    monkeypatch.setattr(compiler, "_cache", lambda: cache)
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "_ready", {})
    return cache


def test_a_second_process_compiles_nothing(real_cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile_kernel(KEY)
    assert real_cache.info().kernels == 1
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "_build", lambda key: pytest.fail("compiled again"))
    again = compiler.compile_kernel(KEY)
    assert type(again) is type(first)
    assert again is not first


def test_processes_fill_the_cache_that_this_one_reads(real_cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_build", lambda key: pytest.fail("compiled here"))
    compiler.precompile([KEY, OTHER], jobs=2)
    assert real_cache.info().kernels == 2
    assert compiler._compiled.keys() == {KEY, OTHER}


def test_a_kernel_that_cannot_be_kept_still_comes(real_cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_build", lambda key: FakeKernel)  # has no object to write
    with pytest.warns(RuntimeWarning, match="is not kept in"):
        assert compiler.compile_kernel(KEY) is FakeKernel
    assert real_cache.info().kernels == 0


@pytest.mark.gpu
def test_gpu_a_kernel_from_the_cache_runs(real_cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trellis_kernels.cute.rotate import rotate_output

    y, scales = torch.randn(3, 256, device="cuda"), torch.randn(1, 256, device="cuda").half()
    wanted = rotate_output(y, scales, out=torch.empty_like(y)).clone()
    assert real_cache.info().kernels == 1
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "_ready", {})
    monkeypatch.setattr(compiler, "_build", lambda key: pytest.fail("compiled again"))
    assert torch.equal(rotate_output(y, scales, out=torch.empty_like(y)), wanted)
