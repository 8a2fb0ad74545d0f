"""Owns what passes through the slots for a rank's share: which bytes are read, and where each of them goes.

It must not know threads or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.source import TrellisWeights
from trellis_prep.code_loads import CodeLoads
from trellis_prep.lanes import Move
from trellis_prep.plan import PreparationPlan
from trellis_prep.reader import ShareReader
from trellis_prep.tables import table_rows
from trellis_prep.transfer import AnyLoad, Load, Read

__all__ = ["flat_bytes", "lies_in_files", "share_loads"]

_APART = 2
"""Batches of codes before each load of a table, so that they are read and copied while a thread fills that."""


def share_loads(
    plan: PreparationPlan, weights: TrellisWeights, tensors: Mapping[str, torch.Tensor]
) -> Iterator[AnyLoad]:
    """The loads of a share: its codes, batch by batch, and between the first of them its tables.

    Args:
        plan: the share, its batches and slots.
        weights: the layer's arrays.
        tensors: destinations by the names of `plan.layout.tensors`, contiguous.

    Yields:
        Loads that fit a slot of the plan; together they write every byte of every tensor once.
    """
    tables = (
        load
        for name, table in table_rows(weights, plan.layout).items()
        for load in _table_loads(name, table, flat_bytes(tensors[name]), plan.slot_bytes)
    )
    codes: Iterable[AnyLoad] = CodeLoads(plan, weights, flat_bytes(tensors["codes"])) if plan.batches else ()
    for number, load in enumerate(codes, 1):
        yield load
        if not number % _APART:
            yield from islice(tables, 1)
    yield from tables


def lies_in_files(plan: PreparationPlan, weights: TrellisWeights) -> bool:
    """Whether the codes of a share can be read as runs of files, as the first linear's tell."""
    layout = plan.layout
    return bool(plan.batches) and ShareReader(layout.source, weights, layout.extent).runs(0, 0) is not None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's storage as `[bytes] uint8`, a view."""
    return tensor.view(-1).view(torch.uint8)


def _table_loads(name: str, rows: npt.NDArray[Any], target: torch.Tensor, slot_bytes: int) -> Iterator[Load]:
    """Whole rows where a slot holds one, else parts of a row."""
    count, columns = rows.shape
    if not rows.size:
        return
    width = min(columns, slot_bytes // rows.itemsize)
    height = max(slot_bytes // (columns * rows.itemsize), 1)
    for top in range(0, count, height):
        for left in range(0, columns, width):
            part = rows[top : top + height, left : left + width]
            place = (top * columns + left) * rows.itemsize
            yield Load(
                f"{name} of rows {top}..{top + part.shape[0]}",
                (Read(0, part.nbytes, partial(_copy_rows, part)),),
                (Move(0, target, place, part.nbytes),),
            )


def _copy_rows(rows: npt.NDArray[Any], out: npt.NDArray[np.uint8]) -> None:
    np.copyto(out.view(rows.dtype).reshape(rows.shape), rows)
