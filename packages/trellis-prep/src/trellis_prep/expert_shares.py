"""Owns the share of experts over expert-parallel ranks, and the maps that routing reads.  It must not know tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from trellis_prep.errors import PrepValueError
from trellis_prep.extents import check_index, check_int, split_evenly

__all__ = ["expert_map", "expert_ranges"]


def expert_ranges(num_experts: int, world_size: int, *, allow_empty: bool = False) -> tuple[range, ...]:
    """Share experts evenly in consecutive ranges; the first ranks take the remainder.

    Args:
        num_experts: experts of the layer.
        world_size: number of expert-parallel ranks.
        allow_empty: whether ranks beyond the number of experts get an empty range.

    Returns:
        The expert ids of each rank, ascending, without overlap or hole.

    Raises:
        PrepTypeError: if an argument is not an int.
        PrepValueError: if there are no experts, or more ranks than experts and none may be empty.
    """
    check_int("num_experts", num_experts)
    check_int("world_size", world_size)
    if num_experts < 1:
        raise PrepValueError(f"num_experts must be at least 1, got {num_experts}")
    if world_size < 1 or (world_size > num_experts and not allow_empty):
        raise PrepValueError(
            f"{world_size} ranks cannot share {num_experts} experts: a rank needs at least one, so the world size must "
            f"be 1 to {num_experts}"
        )
    shares = split_evenly(num_experts, world_size)
    return tuple(range(end - share, end) for share, end in zip(shares, accumulate(shares), strict=True))


def expert_map(num_experts: int, owned: Iterable[int]) -> npt.NDArray[np.int32]:
    """Where each expert of a layer is among those that a rank holds.

    Args:
        num_experts: experts of the layer.
        owned: ids of the rank's experts in the order of its storage, any subset in any order.

    Returns:
        `[num_experts] int32`: local index, or -1 where the rank does not hold the expert.

    Raises:
        PrepTypeError: if a number is not an int.
        PrepValueError: if an id is outside the layer or named twice.
    """
    check_int("num_experts", num_experts)
    if num_experts < 1:
        raise PrepValueError(f"num_experts must be at least 1, got {num_experts}")
    table = np.full(num_experts, -1, dtype=np.int32)
    for local, expert in enumerate(owned):
        check_index("expert", expert, num_experts)
        if table[expert] >= 0:
            raise PrepValueError(f"expert {expert} is owned twice: at {table[expert]} and at {local}")
        table[expert] = local
    return table
