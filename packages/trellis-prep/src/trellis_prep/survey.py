"""Owns what the command prepares: a checkpoint's layers, this rank's share of each, and how fast they can be read.

It must not print or parse arguments.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

import numpy as np

from trellis_format.checkpoint import Checkpoint
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import LayerKey, find_layer, find_layers
from trellis_format.extent import TrellisExtent
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.errors import PrepValueError
from trellis_prep.extents import rank_extent
from trellis_prep.plan import PreparationPlan
from trellis_prep.reader import ShareReader

__all__ = ["ReadSample", "open_layers", "parse_layers", "rank_share", "read_sample", "select_layers"]

MAX_LAYER = 99_999
"""Highest layer index that a selection may name."""

ReadSample = tuple[int, float]
"""(bytes, seconds) of a read."""

_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_DIGITS = len(str(MAX_LAYER))


def parse_layers(text: str) -> tuple[int, ...]:
    """The layer indices of a selection such as "0-3,7", ascending.

    Raises:
        PrepValueError: if a part is neither an index nor an ascending range, or above the highest index.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise PrepValueError(f"{part.strip()!r} is not a layer or a range of layers such as 0-3")
        ends = [text.lstrip("0") or "0" for text in (match[1], match[2] or match[1])]
        first, last = (int(text) if len(text) <= _DIGITS else MAX_LAYER + 1 for text in ends)
        if first > last or last > MAX_LAYER:
            raise PrepValueError(f"layers {part.strip()[:40]} must ascend and be at most {MAX_LAYER}")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def select_layers(checkpoint: Checkpoint, wanted: Sequence[int] | None) -> tuple[LayerKey, ...]:
    """The layers with experts whose index is wanted (None: all).

    Raises:
        PrepValueError: if there are none, or a wanted index has no experts; names those that have.
        FormatUnsupportedError: if names are of a dialect that is not read.
    """
    keys = tuple(find_layers(checkpoint))
    known = sorted({key.index for key in keys})
    if not keys:
        raise PrepValueError(f"{checkpoint.path} has no layer with EXL3 experts")
    absent = sorted(set(wanted or ()) - set(known))
    if absent:
        raise PrepValueError(f"layers {_listed(absent)} have no experts; those that have: {_listed(known)}")
    return keys if wanted is None else tuple(key for key in keys if key.index in set(wanted))


def open_layers(
    checkpoint: Checkpoint, keys: Sequence[LayerKey]
) -> Iterator[tuple[LayerKey, TrellisSource, TrellisWeights]]:
    """Describe layers one after another.

    Raises:
        FormatError: if a layer breaks a rule.
    """
    for key in keys:
        yield key, *trellis_from_exl3(find_layer(checkpoint, key))


def rank_share(source: TrellisSource, rank: int, world_size: int) -> TrellisExtent:
    """This rank's extent of the even partition.

    Raises:
        PrepTypeError, PrepValueError: as `rank_extent`.
    """
    return rank_extent(source.geometry.padded_intermediate_size, rank, world_size)


def read_sample(plan: PreparationPlan, weights: TrellisWeights) -> ReadSample:
    """Read the first expert's share as preparation would, and time it.

    Args:
        plan: the share; its staging bound also bounds this read.
        weights: the layer's arrays.

    Raises:
        PrepReadError: if a file cannot be read.
    """
    layout, total = plan.layout, 0
    reader = ShareReader(layout.source, weights, layout.extent)
    begin = time.perf_counter()
    for projection in range(layout.offsets.shape[1]):
        out = np.empty(layout.linear_bytes(0, projection), dtype=np.uint8)
        reader.read(0, projection, out)
        total += out.size
    return total, time.perf_counter() - begin


def _listed(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:20])
    return shown if len(indices) <= 20 else f"{shown}, ... ({len(indices)} in all)"
