"""Owns the measurement of preparation into rows.  It must not know how weights get to a device."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trellis_format.extent import TrellisExtent
from trellis_format.rates import Rate
from trellis_kernels.bench.timing import Samples
from trellis_moe.bench.record import Recorder, pinned_copy
from trellis_moe.receipts.figures import KIMI_LAYERS, LAYER_1GB, MODEL_40GB
from trellis_moe.receipts.schema import Check, Memory, PrepareCase
from trellis_prep import TrellisStaging, plan_layout
from trellis_prep.bench import PreparationMeasurement, make_layer, measure_preparation

__all__ = ["FURTHER_PREPARATIONS", "GPU_PREPARATIONS", "TINY_PREPARATIONS", "Preparation", "measure_layer_preparations"]

MIB = 1 << 20
_REPEATS = 7
_REFERENCE = "a second read of the source, every linear"


@dataclass(frozen=True)
class Preparation:
    """One layer, prepared under some bounds.

    Args:
        name: of the layer.
        hidden: hidden channels.
        intermediate: intermediate channels of the whole layer.
        experts: how many.
        k: rate.
        bounds: of staging, bytes.
        slots: of the share, (first, count); None is the whole layer.
        sparse: whether codes are holes of the file, which take no room on disk.
        layers: (name, preparations held at a time, bound) of a model made of this layer; None for none.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    k: str
    bounds: tuple[int, ...]
    slots: tuple[int, int] | None = None
    sparse: bool = False
    layers: tuple[str, int, int] | None = None


_KIMI_WIDE, _KIMI_NARROW = KIMI_LAYERS
GPU_PREPARATIONS = (
    Preparation(LAYER_1GB, 4096, 1408, 128, "4", (64 * MIB, 16 * MIB), layers=(MODEL_40GB, 37, 64 * MIB)),
    Preparation(_KIMI_WIDE, 3584, 3072, 896, "2", (64 * MIB,), slots=(0, 12), sparse=True),
    Preparation(_KIMI_NARROW, 3584, 3072, 896, "2", (64 * MIB,), slots=(24, 8), sparse=True),
)
"""What is asked for: 1.1 GB of codes, forty times as many, and two ranks of a Kimi-K3 layer."""
FURTHER_PREPARATIONS = (Preparation(LAYER_1GB, 4096, 1408, 128, "4", (32 * MIB, 128 * MIB)),)
"""Other bounds of the same layer."""
TINY_PREPARATIONS = (Preparation("tiny layer", 256, 256, 4, "3", (MIB,), layers=("tiny model", 3, MIB)),)
"""What a CPU does in milliseconds; for rehearsals."""


def measure_layer_preparations(recorder: Recorder, preparation: Preparation) -> None:
    """Write a layer to a temporary folder, and record its preparations and the plain copies beside them.

    Args:
        recorder: takes the rows.
        preparation: which.

    Raises:
        ValueError: if prepared codes are not those of the source.
        PrepError, FormatError: if the layer cannot be written or prepared.
    """
    folder = Path(tempfile.mkdtemp(prefix="trellis-bench-"))
    try:
        source, weights = make_layer(
            folder / "layer",
            hidden=preparation.hidden,
            intermediate=preparation.intermediate,
            experts=preparation.experts,
            rate=Rate.of(preparation.k),
            sparse=preparation.sparse,
        )
        extent = _share(source.extent.width, preparation.slots)
        runs = [(preparation.name, 1, bound) for bound in preparation.bounds]
        runs += [] if preparation.layers is None else [preparation.layers]
        for name, layers, bound in runs:
            found = measure_preparation(
                source,
                weights,
                device=recorder.device,
                staging=TrellisStaging(max_bytes=bound),
                extent=extent,
                repeats=_REPEATS,
                layers=layers,
            )
            _add(recorder, name, found, plan_layout(source, extent).code_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _share(width: int, slots: tuple[int, int] | None) -> TrellisExtent:
    if slots is None:
        return TrellisExtent.whole(width)
    return TrellisExtent(global_intermediate_size=width, first_slot=slots[0], slot_count=slots[1])


def _add(recorder: Recorder, name: str, found: PreparationMeasurement, code_bytes: int) -> None:
    copy = pinned_copy(name, found.bound_bytes)
    recorder.add_ceiling(copy, "bytes", found.nbytes, Samples(found.copy_samples_ns))
    recorder.add_row(
        PrepareCase(layer=name, layers=found.layers, bound_bytes=found.bound_bytes, code_bytes=code_bytes),
        Samples(found.samples_ns),
        nbytes=found.nbytes,
        flops=0,
        weights=0,
        check=Check(reference=_REFERENCE, error=0.0 if found.is_exact else 1.0, bound=0.0),
        memory=Memory(
            planned_bytes=found.nbytes * found.layers,
            final_bytes=found.final_bytes,
            bound_bytes=found.bound_bytes,
            peak_host_bytes=found.peak_host_bytes,
            peak_device_bytes=found.peak_device_bytes,
        ),
    )
