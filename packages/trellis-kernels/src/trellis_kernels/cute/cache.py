"""Owns the persistent cache of compiled kernels: object files by content, written atomically, bounded in bytes.

It must not know how a kernel is built or launched.

A file's name is the digest of all that decides its content: the key, the sources that generators read, the versions of
the DSL and of Python's minor release, and the host's architecture.  Its last bytes are the digest of the rest, so that
a damaged file is a miss and not a crash.  Objects are machine code that this process runs, so a folder that others may
write is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trellis_format
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.environment import cache_folder
from trellis_kernels.errors import KernelValueError

__all__ = ["CacheInfo", "ObjectCache", "default_cache", "source_digest"]

DEFAULT_MAX_BYTES = 1 << 30
"""Bytes that a cache holds unless it is told otherwise."""

_SUFFIX = ".o"
_DIGEST_BYTES = 32
_OTHERS_MAY_WRITE = 0o022


@dataclass(frozen=True)
class CacheInfo:
    """What a cache holds.

    Attributes:
        folder: where.
        kernels: object files.
        size_bytes: their bytes together.
        max_bytes: bytes that they may have.
    """

    folder: Path
    kernels: int
    size_bytes: int
    max_bytes: int


class ObjectCache:
    """A folder of compiled kernels.

    Args:
        folder: where; made if it is not there.
        max_bytes: bytes that the files may have together; the least recently used go first.

    Raises:
        KernelValueError: if the folder belongs to another user or others may write it, or the bound is not positive.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_bytes <= 0:
            raise KernelValueError(f"a cache's bound must be above 0 bytes, got {max_bytes}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & _OTHERS_MAY_WRITE:
            raise KernelValueError(
                f"cache folder {folder} must be this user's ({os.getuid()}) and writable by nobody else, "
                f"got owner {status.st_uid} and mode {status.st_mode & 0o777:o}"
            )
        self.folder = folder
        self.max_bytes = max_bytes

    def path(self, key: KernelKey) -> Path:
        """The file that a kernel has or would have."""
        return self.folder / (_name(key) + _SUFFIX)

    def load(self, key: KernelKey) -> Callable[..., Any] | None:
        """The kernel of a key, or None if it is not here or its file is damaged."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
            path.unlink(missing_ok=True)
            return None
        os.utime(path)  # recently used
        return _load_object(path, _symbol(key))

    def store(self, key: KernelKey, kernel: Any) -> Path:
        """Write a compiled kernel and drop the least recently used ones beyond the bound.

        Args:
            key: what it was compiled for.
            kernel: what the DSL's compiler returned.

        Returns:
            Its file.
        """
        _preload_runtime()
        content: bytes = kernel.dump_to_object(_symbol(key))
        path = self.path(key)
        handle, part = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content + hashlib.sha256(content).digest())
            os.replace(part, path)  # readers see the whole file or none
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        self._shrink(keep=path)
        return path

    def info(self) -> CacheInfo:
        """What is here."""
        sizes = [size for _, size, _ in self._files()]
        return CacheInfo(self.folder, len(sizes), sum(sizes), self.max_bytes)

    def clear(self) -> int:
        """Remove every kernel; returns how many there were."""
        files = self._files()
        for _, _, path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, bytes and path of every object, least recently used first."""
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process removed it
                continue
            found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _shrink(self, keep: Path) -> None:
        files = self._files()
        size = sum(size for _, size, _ in files)
        for _, part, path in files:
            if size <= self.max_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                size -= part


@lru_cache
def default_cache() -> ObjectCache | None:
    """The cache that launches use: that of the environment, or None if it is off or its folder cannot be used."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        return ObjectCache(folder)
    except (OSError, KernelValueError) as error:
        warnings.warn(f"compiled kernels are not kept: {error}", RuntimeWarning, stacklevel=2)
        return None


@lru_cache
def source_digest() -> str:
    """Digest of every source file that can decide what a generator emits."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parent, Path(str(trellis_format.__file__)).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root.parent)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _name(key: KernelKey) -> str:
    minor = ".".join(map(str, sys.version_info[:2]))
    parts = (repr(key), source_digest(), version("nvidia-cutlass-dsl"), minor, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _symbol(key: KernelKey) -> str:
    return f"trellis_{_name(key)}"


def _load_object(path: Path, symbol: str) -> Callable[..., Any]:
    import cutlass.cute as cute

    _preload_runtime()
    kernel: Callable[..., Any] = getattr(cute.runtime.load_module(str(path)), symbol)
    return kernel


@lru_cache
def _preload_runtime() -> None:
    """Make the DSL's runtime visible to the linker of objects, which looks in this process alone."""
    from cutlass.cutlass_dsl import CuTeDSL

    for library in CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
