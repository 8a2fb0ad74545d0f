"""Owns which bytes a rank needs and how they reach its device.  It must not know kernels or routing.

A name is imported when it is first asked for: torch takes seconds to load, and the command must answer an interrupt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trellis_format.extent import TrellisExtent
    from trellis_prep.cache import CacheWarning, PreparedCache
    from trellis_prep.errors import (
        PrepDeviceError,
        PrepError,
        PrepMemoryError,
        PrepReadError,
        PrepStateError,
        PrepTypeError,
        PrepValueError,
    )
    from trellis_prep.expert_shares import expert_map, expert_ranges
    from trellis_prep.extents import check_extent, even_extents, rank_extent
    from trellis_prep.grid import RankGrid, RankShare
    from trellis_prep.layout import LAYOUT_VERSION, PreparedLayout, plan_layout
    from trellis_prep.linear import PreparedLinear, prepare_linear
    from trellis_prep.partition import balanced_extents, partition_extents
    from trellis_prep.plan import PreparationPlan, plan_preparation
    from trellis_prep.preparation import prepare
    from trellis_prep.prepared import PreparedExperts
    from trellis_prep.selection import select_experts
    from trellis_prep.stage import StagingBuffer
    from trellis_prep.staging import TrellisStaging

__all__ = [
    "LAYOUT_VERSION",
    "CacheWarning",
    "PrepDeviceError",
    "PrepError",
    "PrepMemoryError",
    "PrepReadError",
    "PrepStateError",
    "PrepTypeError",
    "PrepValueError",
    "PreparationPlan",
    "PreparedCache",
    "PreparedExperts",
    "PreparedLayout",
    "PreparedLinear",
    "RankGrid",
    "RankShare",
    "StagingBuffer",
    "TrellisExtent",
    "TrellisStaging",
    "balanced_extents",
    "check_extent",
    "even_extents",
    "expert_map",
    "expert_ranges",
    "partition_extents",
    "plan_layout",
    "plan_preparation",
    "prepare",
    "prepare_linear",
    "rank_extent",
    "select_experts",
]

_MODULES = (
    "cache", "errors", "expert_shares", "extents", "grid", "layout", "linear", "partition", "plan", "preparation",
    "prepared", "selection", "stage", "staging",
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "TrellisExtent":
        return globals().setdefault(name, importlib.import_module("trellis_format.extent").TrellisExtent)
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in found["__all__"]:
                return globals().setdefault(name, found[name])
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
