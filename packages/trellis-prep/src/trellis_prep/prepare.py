"""Owns preparation: a rank's share, streamed through bounded staging straight into its final place.

It must not know kernels or routing.  Addresses exist before bytes arrive, each byte is read once and written once, and
a CPU destination takes the same path as a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.errors import PrepValueError
from trellis_prep.layout import WORD_BYTES, PreparedLayout, plan_layout
from trellis_prep.prepared import PreparedExperts
from trellis_prep.reader import check_layout, read_linear
from trellis_prep.staging import Batch, StagingRing, TrellisStaging, plan_batches
from trellis_prep.tables import move_tables

__all__ = ["prepare"]

Progress = Callable[[int, int], None]


def prepare(
    source: TrellisSource,
    weights: TrellisWeights,
    *,
    device: torch.device | str | None = None,
    staging: TrellisStaging | None = None,
    extent: TrellisExtent | None = None,
    progress: Progress | None = None,
    poison: bool = False,
) -> PreparedExperts:
    """Put a rank's share of a layer on a device.

    Args:
        source: the layer.
        weights: its arrays.
        device: destination, "cpu" (default) or a CUDA device.
        staging: bounds on host slots; default 64 experts and 64 MiB.
        extent: the share of the intermediate axis (default: all that the weights cover).
        progress: called with (bytes done, bytes in all) after each batch of codes.
        poison: overwrite staging slots after their release, to find late readers.

    Raises:
        PrepValueError: if the device cannot be used, the extent does not fit, or an expert exceeds the staging bound
            (before anything is allocated); names both numbers.
        PrepUnsupportedError: if the codes' layout cannot be prepared.
        FormatValueError: if a file is short or changed while it is read.
    """
    check_layout(source)
    target = _destination(device)
    bounds = staging or TrellisStaging()
    layout = plan_layout(source, extent)
    experts = source.geometry.num_experts
    expert_words = [
        sum(layout.linear_words(expert, index) for index in range(len(source.geometry.projections)))
        for expert in range(experts)
    ]
    batches = plan_batches([words * WORD_BYTES for words in expert_words], bounds)
    codes = torch.empty(layout.code_words, dtype=torch.int32, device=target)
    tables = move_tables(weights, layout, target)
    if layout.code_words:
        ring = StagingRing(batches.slots, batches.slot_bytes, device=target, poison=poison)
        if ring.nbytes > bounds.max_bytes:
            raise PrepValueError(f"staging slots of {ring.nbytes} bytes exceed the bound of {bounds.max_bytes}")
        _stream_codes(source, weights, layout, batches.batches, ring, codes, progress)
    return PreparedExperts(
        layout=layout,
        codes=codes,
        descriptors=tables.descriptors,
        input_scales=tables.input_scales,
        intermediate_scales=tables.intermediate_scales,
        output_scales=tables.output_scales,
        biases=tables.biases,
    )


def _stream_codes(
    source: TrellisSource,
    weights: TrellisWeights,
    layout: PreparedLayout,
    batches: tuple[Batch, ...],
    ring: StagingRing,
    codes: torch.Tensor,
    progress: Progress | None,
) -> None:
    flat = codes.view(torch.uint8)
    done = 0
    try:
        for batch in batches:
            with ring.lend() as slot:
                filled = 0
                for projection in range(len(source.geometry.projections)):
                    first = filled
                    for expert in range(batch.first, batch.end):
                        nbytes = layout.linear_words(expert, projection) * WORD_BYTES
                        read_linear(source, weights, expert, projection, layout.extent, slot[filled : filled + nbytes])
                        filled += nbytes
                    place = int(layout.offsets[batch.first, projection]) * WORD_BYTES
                    ring.copy(flat[place : place + filled - first], first)
            done += batch.nbytes
            if progress is not None:
                progress(done, layout.code_bytes)
    finally:
        ring.drain()  # a copy in flight must not outlive its slot, on success or failure


def _destination(device: torch.device | str | None) -> torch.device:
    try:
        target = torch.device(device if device is not None else "cpu")
    except RuntimeError as error:
        raise PrepValueError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from error
    if target.type not in ("cpu", "cuda"):
        raise PrepValueError(f"device must be cpu or cuda, got {target.type}")
    if target.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0 or (target.index or 0) >= count:
            raise PrepValueError(f"device {target} is not there: {count} CUDA devices are visible")
        if target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
    return target
