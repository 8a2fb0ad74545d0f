"""Owns preparation: a rank's share, streamed through bounded staging straight into its final place.

It must not know kernels or routing.  Addresses exist before bytes arrive, each byte is read once and written once, and
a CPU destination takes the same path as a GPU.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch

from trellis_format.extent import TrellisExtent
from trellis_format.files.collector import paused_collector
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.checks import check_weights
from trellis_prep.devices import TensorLayout, allocate, resolve_device
from trellis_prep.errors import PrepValueError
from trellis_prep.lanes import open_lane
from trellis_prep.loads import lies_in_files, share_loads
from trellis_prep.plan import PreparationPlan, plan_preparation
from trellis_prep.prepared import PreparedExperts
from trellis_prep.slots import SlotRing
from trellis_prep.stage import StagingBuffer
from trellis_prep.staging import TrellisStaging
from trellis_prep.transfer import AnyLoad, transfer

__all__ = ["Progress", "StreamPlan", "fill_tensors", "prepare", "stream_tensors"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), in the caller's thread."""


def prepare(
    source: TrellisSource,
    weights: TrellisWeights,
    *,
    device: torch.device | str | None = None,
    staging: TrellisStaging | None = None,
    extent: TrellisExtent | None = None,
    progress: Progress | None = None,
    poison: bool = False,
    buffer: StagingBuffer | None = None,
) -> PreparedExperts:
    """Put a rank's share of a layer on a device.

    It reads the share's bytes and no others, holds at most `staging.max_bytes` of them on the host, and needs no
    device memory beyond the prepared tensors.  When it returns, every byte has arrived.  When it raises, also on an
    interrupt from the keyboard, everything that it took is free again.

    Args:
        source: the layer.
        weights: its arrays.
        device: destination, "cpu" (default) or a CUDA device.
        staging: bounds on host slots; default 64 experts and 64 MiB.
        extent: the share of the intermediate axis (default: all that the weights cover).
        progress: called with (bytes done, bytes in all) after each slot's copies were issued.
        poison: overwrite staging slots after their release, to find late readers.
        buffer: host memory that is kept from layer to layer; None takes its own for this one.

    Raises:
        PrepTypeError: if an argument, or an array of the weights, has the wrong type.
        PrepValueError: if the device cannot be used, the extent or the weights do not fit the source, or an expert
            exceeds the staging bound ("insufficient", before anything is allocated); names both numbers.
        FormatValueError: if the extent cuts a Hadamard block.
        PrepReadError: if a file is short, changed or unreadable; names file, tensor, expert and projection.
        PrepMemoryError: if memory runs out on the host or the device; names what for.
        PrepDeviceError: if a copy fails.
        PrepStateError: if a CUDA graph is being captured, or the buffer is in use or closed.
    """
    plan = plan_preparation(source, extent=extent, staging=staging)
    check_weights(source, weights)
    target, in_files = resolve_device(device), lies_in_files(plan, weights)
    return fill_tensors(
        plan,
        target,
        lambda tensors: share_loads(plan, weights, tensors),
        progress=progress,
        poison=poison,
        readers=plan.readers,
        pollers=plan.pollers if in_files else 0,
        workers=plan.workers and in_files,
        buffer=buffer,
    )


def fill_tensors(
    plan: PreparationPlan,
    device: torch.device,
    loads: Callable[[Mapping[str, torch.Tensor]], Iterable[AnyLoad]],
    *,
    progress: Progress | None = None,
    poison: bool = False,
    readers: int = 1,
    pollers: int = 0,
    workers: bool = False,
    buffer: StagingBuffer | None = None,
) -> PreparedExperts:
    """Allocate prepared tensors and fill them through a ring of slots.

    Args:
        plan: tensors, slots and bound.
        device: destination.
        loads: gives, for the destinations by name, loads that together write each of their bytes once.
        progress: see `prepare`.
        poison: see `prepare`.
        readers: threads that fill slots; with one, reads are done in the order of the loads.
        pollers: threads of the kernel that fill slots instead, where the system gives them; see `transfer`.
        workers: whether the kernel's own pool does; see `transfer`.
        buffer: see `prepare`.

    Raises:
        PrepMemoryError: if memory runs out.
        PrepDeviceError: if a copy fails.
        BaseException: what a load or `progress` raised; everything is freed first.
    """
    tensors = stream_tensors(
        plan,
        device,
        loads,
        progress=progress,
        poison=poison,
        readers=readers,
        pollers=pollers,
        workers=workers,
        buffer=buffer,
    )
    return PreparedExperts.of(plan.layout, tensors)


class StreamPlan(Protocol):
    """What a stream of tensors needs to know: where they lie, and the slots that their bytes pass through."""

    @property
    def layout(self) -> TensorLayout:
        """The tensors."""

    @property
    def staging(self) -> TrellisStaging:
        """The bounds."""

    @property
    def slots(self) -> int:
        """Host slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot."""


def stream_tensors(
    plan: StreamPlan,
    device: torch.device,
    loads: Callable[[Mapping[str, torch.Tensor]], Iterable[AnyLoad]],
    *,
    progress: Progress | None = None,
    poison: bool = False,
    readers: int = 1,
    pollers: int = 0,
    workers: bool = False,
    buffer: StagingBuffer | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate the tensors of any layout and fill them through a ring of slots; arguments as `fill_tensors`.

    Returns:
        The tensors by the names of `plan.layout.tensors`.

    Raises:
        PrepMemoryError: if memory runs out.
        PrepDeviceError: if a copy fails.
        BaseException: what a load or `progress` raised; everything is freed first.
    """
    total, done = plan.layout.total_bytes, 0

    def moved(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        assert progress is not None
        progress(done, total)

    tensors: dict[str, torch.Tensor] = {}
    try:
        tensors |= allocate(plan.layout, device)
        with paused_collector(), _open_ring(plan, device, poison, buffer) as ring:
            assert ring.nbytes <= plan.staging.max_bytes  # the plan's arithmetic
            told = None if progress is None else moved
            lane = open_lane(device)
            transfer(loads(tensors), ring, lane, told, readers=readers, pollers=pollers, workers=workers)
        assert progress is None or done == total  # the loads' arithmetic
    except BaseException as error:
        tensors.clear()
        _release_frames(error)
        raise
    return tensors


@contextlib.contextmanager
def _open_ring(
    plan: StreamPlan, device: torch.device, poison: bool, buffer: StagingBuffer | None
) -> Iterator[SlotRing]:
    if buffer is None:
        with SlotRing(
            plan.slots, plan.slot_bytes, device=device if device.type == "cuda" else None, poison=poison
        ) as ring:
            yield ring
        return
    if buffer.device != device:
        raise PrepValueError(f"the staging buffer is for {buffer.device}, the weights go to {device}")
    with (
        buffer.lend(plan.slots * plan.slot_bytes, plan.staging.max_bytes) as memory,
        SlotRing(plan.slots, plan.slot_bytes, device=None, poison=poison, buffer=memory) as ring,
    ):
        yield ring


def _release_frames(error: BaseException | None) -> None:
    """Empty the frames that an exception and its causes hold: one that is kept must not keep device memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__  # not __context__, which may be an error that the caller was handling
