"""Owns the table of GPU architectures that kernels are compiled for.  It must not know any kernel.

An architecture is a compile target such as `sm_90a`; a device is matched to one by its compute capability.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

from trellis_kernels.errors import KernelUnsupportedError, KernelValueError

__all__ = ["ARCHS", "Arch", "arch_of_device", "compiling_for", "current_target", "get_arch"]


@dataclass(frozen=True)
class Arch:
    """One compile target.

    Args:
        name: target of the compiler, for example `sm_90a`.
        capabilities: compute capabilities (major, minor) that run its binaries.
        has_stmatrix: whether a warp stores four 8 x 8 matrices to shared memory in one instruction.
        rounds_products_once: whether an fp16 product `m16n8k16` into fp16 is its exact sum, rounded once to nearest
            even, where that sum spans few bits.  PTX leaves it open, so it is true only of a GPU where it was found so
            for all that decoding multiplies.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    has_stmatrix: bool
    rounds_products_once: bool = False


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # a plain target runs on every later minor version of its major one; an `a` target only on its own version
        Arch("sm_80", ((8, 0), (8, 6), (8, 7), (8, 9)), has_stmatrix=False),
        Arch("sm_90a", ((9, 0),), has_stmatrix=True, rounds_products_once=True),
        Arch("sm_100a", ((10, 0),), has_stmatrix=True),
        Arch("sm_120a", ((12, 0),), has_stmatrix=True),
    )
}
"""Every compile target by name."""


def get_arch(name: str) -> Arch:
    """The compile target of that name.

    Raises:
        KernelValueError: if there is none; names the known ones.
    """
    try:
        return ARCHS[name]
    except KeyError:
        raise KernelValueError(f"unknown architecture {name!r}; known: {', '.join(ARCHS)}") from None


_target: ContextVar[Arch | None] = ContextVar("target", default=None)


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Name the compile target for generators that run inside.

    Raises:
        KernelValueError: if there is no such target.
    """
    token = _target.set(get_arch(name))
    try:
        yield
    finally:
        _target.reset(token)


def current_target() -> Arch | None:
    """The target that is compiled for; None outside of a compilation, where code must do for any target."""
    return _target.get()


@lru_cache
def arch_of_device(index: int) -> Arch:
    """The compile target whose binaries run on CUDA device `index`.

    Raises:
        KernelUnsupportedError: if no target covers its compute capability; names it and the covered ones.
    """
    capability = torch.cuda.get_device_capability(index)
    for arch in ARCHS.values():
        if capability in arch.capabilities:
            return arch
    covered = ", ".join(f"{major}.{minor}" for arch in ARCHS.values() for major, minor in arch.capabilities)
    name = torch.cuda.get_device_name(index)
    raise KernelUnsupportedError(
        f"CUDA device {index} ({name}) has compute capability {capability[0]}.{capability[1]}; covered: {covered}"
    )
