"""Owns launches whose arguments stay in place from one to the next, for each thread and kernel.

It must not know any kernel.  A compiled function turns its arguments into C values at every call, 160 us for the 26 of
a GEMM; written over in place they take 3 us.
"""

from __future__ import annotations

import threading
from typing import Any

import cuda.bindings.driver as cuda
import torch

from trellis_kernels.cute import compiler
from trellis_kernels.cute.argument_slots import ArgumentSlots
from trellis_kernels.cute.argument_tuples import kinds, number
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.errors import KernelValueError

__all__ = ["launch"]


class _Kept(threading.local):
    """The slots of a thread: a function reads them before its call returns, so that a thread's calls never overlap."""

    def __init__(self) -> None:
        self.slots: dict[KernelKey, tuple[Any, ArgumentSlots]] = {}


_kept = _Kept()


def launch(
    key: KernelKey,
    device: torch.device,
    arguments: type[tuple[Any, ...]],
    **values: torch.Tensor | int | float | None,
) -> None:
    """Launch a kernel on the current stream of a device.

    Args:
        key: of the kernel.
        device: a CUDA device.
        arguments: the named tuple that the kernel takes.
        values: of its fields, as `argument_tuples.filled` takes them.

    Raises:
        KernelValueError: if there is no such field.
        ColdKernelError: if the kernel is not ready and may not be compiled, frozen or under capture.
    """
    with torch.cuda.device(device):
        if surplus := values.keys() - kinds(arguments).keys():
            raise KernelValueError(f"{arguments.__name__} has no field {', '.join(sorted(surplus))}")
        slots = _slots(key, compiler.ready(key), arguments)
        stream = torch.cuda.current_stream().cuda_stream
        slots.set(stream=stream, **{name: number(values.get(name)) for name in kinds(arguments)})
        slots()


def _slots(key: KernelKey, kernel: Any, arguments: type[tuple[Any, ...]]) -> ArgumentSlots:
    known = _kept.slots.get(key)
    if known is None or known[0] is not kernel:
        known = _kept.slots[key] = kernel, ArgumentSlots(kernel, arguments, cuda.CUstream(0))
    return known[1]
