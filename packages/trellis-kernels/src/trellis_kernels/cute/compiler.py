"""Owns the compilation of kernels from their keys, and the process's table of compiled ones.

It must not know any kernel: a key names the module that builds it.  Compiling needs no GPU and launches nothing, and is
skipped where the persistent cache has the kernel.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from trellis_kernels.cute.archs import arch_of_device, compiling_for
from trellis_kernels.cute.cache import ObjectCache, default_cache
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.errors import ColdKernelError, KernelUnsupportedError

__all__ = [
    "build_cubin",
    "cold",
    "compile_kernel",
    "freeze",
    "is_frozen",
    "kernel_count",
    "precompile",
    "ready",
    "thaw",
    "use_cache",
]

Kernel = Callable[..., Any]

_lock = RLock()
_compiled: dict[KernelKey, Kernel] = {}
_ready: dict[KernelKey, Kernel] = {}  # those whose binary is also on the devices
_frozen = False
_cache: Callable[[], ObjectCache | None] = default_cache


def use_cache(cache: ObjectCache | None) -> None:
    """Choose the persistent cache of this process from here on; None is none.

    Without a call it is the one of the environment: see `trellis_kernels.environment`.
    """
    global _cache
    _cache = lambda: cache  # noqa: E731  # the default is a function too, which makes its folder on first use


def compile_kernel(key: KernelKey) -> Kernel:
    """The compiled kernel of a key, compiled or read from the cache on the first call with an equal key.

    Touches no device.

    Raises:
        KernelUnsupportedError: if nvidia-cutlass-dsl is not installed.
    """
    with _lock:
        if key not in _compiled:
            _compiled[key] = _cached(key) or _compile(key)
        return _compiled[key]


def _cached(key: KernelKey) -> Kernel | None:
    cache = _cache()
    return None if cache is None else cache.load(key)


def _compile(key: KernelKey) -> Kernel:
    kernel: Kernel = _build(key)
    cache = _cache()
    if cache is not None:
        try:
            cache.store(key, kernel)
        except Exception as error:  # noqa: BLE001  # a kernel that cannot be kept still runs, whatever kept it from disk
            warnings.warn(f"kernel [{key}] is not kept in {cache.folder}: {error}", RuntimeWarning, stacklevel=2)
    return kernel


def precompile(
    keys: Iterable[KernelKey], *, jobs: int | None = 1, progress: Callable[[int, int], None] | None = None
) -> None:
    """Make kernels ready to launch: compile each, and put those of this process's device on it.

    Args:
        keys: what to compile; keys of other architectures are compiled and no more.
        jobs: processes that compile, None for one on each CPU.  More than one needs the persistent cache, through which
            kernels come back; without it this process compiles alone.
        progress: called after each kernel with how many are done, and of how many.

    Raises:
        KernelUnsupportedError: if nvidia-cutlass-dsl is not installed.
    """
    wanted = list(dict.fromkeys(keys))
    if jobs != 1:
        _compile_in_processes(wanted, jobs)
    for done, key in enumerate(wanted, start=1):
        if torch.cuda.is_available() and arch_of_device(torch.cuda.current_device()).name == key.arch:
            _load(key)
        else:
            compile_kernel(key)
        if progress is not None:
            progress(done, len(wanted))


def _compile_in_processes(keys: list[KernelKey], jobs: int | None) -> None:
    """Fill the persistent cache with the kernels that it lacks."""
    cache = _cache()
    if cache is None:
        return
    missing = [key for key in keys if key not in _compiled and not cache.path(key).exists()]
    workers = min(jobs or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        return
    # a forked child would share the parent's CUDA and MLIR state, so each worker starts clean
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_into, missing, [cache.folder] * len(missing), [cache.max_bytes] * len(missing)))


def _compile_into(key: KernelKey, folder: Path, max_bytes: int) -> None:
    """Compile one kernel in a worker and leave it in the cache."""
    use_cache(ObjectCache(folder, max_bytes))
    compile_kernel(key)


def freeze() -> None:
    """Forbid compilation by launches from here on: a launch whose kernel is not ready raises ColdKernelError."""
    global _frozen
    _frozen = True


def thaw() -> None:
    """Undo `freeze`."""
    global _frozen
    _frozen = False


def is_frozen() -> bool:
    """Whether launches may not compile."""
    return _frozen


def cold(keys: Iterable[KernelKey]) -> tuple[KernelKey, ...]:
    """Those of some keys that are not ready: a launch would have to compile or to load them."""
    done = _ready if torch.cuda.is_available() else _compiled
    return tuple(key for key in dict.fromkeys(keys) if key not in done)


def kernel_count() -> int:
    """Kernels that this process has compiled or read from the cache; grows with each that was missing."""
    return len(_compiled)


def ready(key: KernelKey) -> Kernel:
    """The kernel of a key, ready to launch on the current device; for launch functions.

    Raises:
        ColdKernelError: if the kernel is not ready and compilation is frozen, or the current stream is being captured.
        KernelUnsupportedError: if nvidia-cutlass-dsl is not installed.
    """
    kernel = _ready.get(key)
    if kernel is not None:
        return kernel
    reason = "compilation is frozen" if _frozen else "the stream is being captured" if _capturing() else None
    if reason:
        raise ColdKernelError(f"kernel [{key}] is not ready and {reason}; pass {key!r} to precompile() before")
    return _load(key)


def build_cubin(key: KernelKey) -> bytes:
    """The binary of a key as an ELF image, freshly compiled.

    Raises:
        KernelUnsupportedError: if nvidia-cutlass-dsl is not installed.
    """
    with _lock, tempfile.TemporaryDirectory() as folder:
        cubin = _build(key, f"--keep-cubin --dump-dir {folder}").artifacts.CUBIN
    if not isinstance(cubin, bytes):  # the DSL leaves the path here when it wrote nothing
        raise KernelUnsupportedError(f"the DSL kept no binary for [{key}]: got {cubin!r}")
    return cubin


def _build(key: KernelKey, extra_options: str = "") -> Any:
    try:
        module = importlib.import_module(key.module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("cutlass", "cuda"):
            raise
        raise KernelUnsupportedError(
            f"kernel [{key}] needs nvidia-cutlass-dsl, which has wheels for Linux only; module {error.name} is missing"
        ) from error
    with compiling_for(key.arch):
        return module.build(key, f"--gpu-arch {key.arch} {extra_options}".strip())


def _load(key: KernelKey) -> Kernel:
    with _lock:
        if key not in _ready:
            kernel: Any = compile_kernel(key)
            kernel.to(None)  # loads the binary, so that a first launch under capture has nothing left to load
            _load_tables(key)
            _ready[key] = kernel
        return _ready[key]


def _load_tables(key: KernelKey) -> None:
    """Put what else a kernel reads on the device: its module's `load(key)`, if it has one."""
    load = getattr(sys.modules.get(key.module), "load", None)
    if load is not None and torch.cuda.is_available():
        load(key)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
