"""Owns the measurement of preparation against a plain pinned copy of the same bytes.

It must not print, nor know commands.  Samples of the two take turns, so that a machine that slows down slows both;
files are read once before, so that all of them come from the page cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from trellis_format.extent import TrellisExtent
from trellis_format.layer_source import open_layer_source
from trellis_format.rates import Rate
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_format.synth import SynthSpec, synth_checkpoint
from trellis_prep.devices import resolve_device
from trellis_prep.errors import PrepValueError
from trellis_prep.extents import check_int
from trellis_prep.measure import Meter
from trellis_prep.pinned import HostBuffer
from trellis_prep.plan import plan_preparation
from trellis_prep.preparation import prepare
from trellis_prep.prepared import PreparedExperts
from trellis_prep.reader import ShareReader
from trellis_prep.stage import StagingBuffer
from trellis_prep.staging import TrellisStaging

__all__ = ["PreparationMeasurement", "make_layer", "measure_preparation"]


@dataclass(frozen=True, kw_only=True)
class PreparationMeasurement:
    """What preparing a share took.

    Attributes:
        device: destination.
        nbytes: bytes that one preparation puts there, codes and tables.
        final_bytes: bytes of the prepared tensors as torch counts them, after the last layer; rounded up by its
            allocator on a GPU.
        layers: preparations that were held at a time while memory was measured.
        bound_bytes: staging bound.
        slots: host slots.
        slot_bytes: bytes of each.
        readers: threads that filled them.
        pollers: threads of the kernel that filled them in their place; 0 for none.
        workers: whether the kernel's own pool did.
        samples_ns: wall time of each preparation through one staging buffer that is kept.
        alone_samples_ns: wall time of each preparation that takes and locks its own.
        copy_samples_ns: wall time of each copy of as many bytes from one page-locked buffer.
        peak_host_bytes: most host memory beyond the final weights and what there was before; None if unknown.
        peak_device_bytes: the same on the device; None on a CPU.
        is_exact: whether all prepared codes equal a second read of the source, linear by linear.
    """

    device: str
    nbytes: int
    final_bytes: int
    layers: int
    bound_bytes: int
    slots: int
    slot_bytes: int
    readers: int
    pollers: int
    workers: bool
    samples_ns: tuple[int, ...]
    alone_samples_ns: tuple[int, ...]
    copy_samples_ns: tuple[int, ...]
    peak_host_bytes: int | None
    peak_device_bytes: int | None
    is_exact: bool

    @property
    def gb_per_second(self) -> float:
        """Median rate of preparation, in 10^9 bytes per second."""
        return self.nbytes / median(self.samples_ns)

    @property
    def copy_gb_per_second(self) -> float:
        """Median rate of the plain copy, in 10^9 bytes per second."""
        return self.nbytes / median(self.copy_samples_ns)

    @property
    def share_of_copy(self) -> float:
        """Rate of preparation by that of the plain copy."""
        return self.gb_per_second / self.copy_gb_per_second


def make_layer(
    folder: str | os.PathLike[str],
    *,
    hidden: int = 4096,
    intermediate: int = 1408,
    experts: int = 128,
    rate: Rate | None = None,
    sparse: bool = False,
) -> tuple[TrellisSource, TrellisWeights]:
    """Write a layer of random codes as an EXL3 checkpoint and describe it; the default is one of 1.1 GB.

    Args:
        folder: the checkpoint's folder; it must not exist, or be empty.
        hidden: hidden channels.
        intermediate: channels of an expert.
        experts: experts.
        rate: K of every linear; default 4.
        sparse: whether codes are holes of the file, which read as zeros and take no room.

    Raises:
        FormatError: if a size is not legal, or the folder cannot be written.
    """
    spec = SynthSpec(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        layers=1,
        rates=(Rate.of(4) if rate is None else rate,),
        sparse=sparse,
    )
    synth_checkpoint(folder, spec)
    return open_layer_source(folder, 0)


def measure_preparation(
    source: TrellisSource,
    weights: TrellisWeights,
    *,
    device: torch.device | str | None = None,
    staging: TrellisStaging | None = None,
    extent: TrellisExtent | None = None,
    repeats: int = 7,
    layers: int = 1,
) -> PreparationMeasurement:
    """Measure preparation of a share, and plain copies of as many bytes, in turn.

    Args:
        source: the layer.
        weights: its arrays.
        device: destination, as in `prepare`.
        staging: bounds, as in `prepare`.
        extent: the share (default: all that the source covers).
        repeats: samples of each; the first preparation, which fills the page cache, is not one.
        layers: preparations of this layer to hold at a time while memory is measured, as a model of so many layers.

    Raises:
        PrepValueError: if a count is not positive.
        PrepError, FormatError: as `prepare`.
    """
    for name, value in (("repeats", repeats), ("layers", layers)):
        check_int(name, value)
        if value < 1:
            raise PrepValueError(f"{name} must be at least 1, got {value}")
    target = resolve_device(device)
    plan = plan_preparation(source, extent=extent, staging=staging)

    def once(buffer: StagingBuffer | None) -> PreparedExperts:
        return prepare(source, weights, device=target, staging=plan.staging, extent=plan.layout.extent, buffer=buffer)

    is_exact = _is_exact(once(None), weights)
    samples, alone, copies = _take_turns(once, plan.layout.total_bytes, target, repeats)
    with Meter(target) as meter, StagingBuffer(target) as buffer:
        held = [once(buffer) for _ in range(layers)]
    assert meter.measured is not None  # the context ended without an error
    final = _held_bytes(held, target)
    host, on_device = meter.measured.above(final)
    return PreparationMeasurement(
        device=str(target),
        nbytes=plan.layout.total_bytes,
        final_bytes=final,
        layers=layers,
        bound_bytes=plan.staging.max_bytes,
        slots=plan.slots,
        slot_bytes=plan.slot_bytes,
        readers=plan.readers,
        pollers=plan.pollers,
        workers=plan.workers,
        samples_ns=samples,
        alone_samples_ns=alone,
        copy_samples_ns=copies,
        peak_host_bytes=host,
        peak_device_bytes=on_device,
        is_exact=is_exact,
    )


def _take_turns(
    once: Callable[[StagingBuffer | None], PreparedExperts], nbytes: int, device: torch.device, repeats: int
) -> tuple[tuple[int, ...], ...]:
    """Times of preparations through one staging buffer, of preparations alone, and of plain copies."""
    locked = HostBuffer(nbytes, device=device if device.type == "cuda" else None)
    turns: list[tuple[int, ...]] = []
    try:
        locked.array.fill(1)
        with StagingBuffer(device) as buffer:
            for _ in range(repeats + 1):
                kept, alone = _timed(lambda: once(buffer)), _timed(lambda: once(None))
                turns.append((kept, alone, _timed_copy(locked.tensor, device)))
    finally:
        locked.close()
    return tuple(zip(*turns[1:], strict=True))  # the first turn warms allocators and caches up


def _timed(work: Callable[[], object]) -> int:
    begin = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - begin


def _timed_copy(source: torch.Tensor, device: torch.device) -> int:
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    _settle(device)
    begin = time.perf_counter_ns()
    target.copy_(source, non_blocking=True)
    _settle(device)
    return time.perf_counter_ns() - begin


def _is_exact(prepared: PreparedExperts, weights: TrellisWeights) -> bool:
    reader = ShareReader(prepared.source, weights, prepared.extent)
    experts, projections = prepared.layout.half_bits.shape
    for expert in range(experts):
        for projection in range(projections):
            tiles = prepared.tiles(expert, projection)[0].cpu().numpy().reshape(-1).view(np.uint8)
            again = np.empty(tiles.size, dtype=np.uint8)
            reader.read(expert, projection, again)
            if not np.array_equal(tiles, again):
                return False
    return True


def _held_bytes(held: list[PreparedExperts], device: torch.device) -> int:
    """Bytes that prepared tensors take: on a GPU as its allocator rounds them, so that the rest is what was beyond."""
    grain = 512 if device.type == "cuda" else 1
    return sum(-(-tensor.nbytes // grain) * grain for experts in held for tensor in experts.tensors.values())


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
