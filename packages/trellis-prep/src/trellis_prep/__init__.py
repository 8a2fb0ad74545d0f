"""Owns which bytes a rank needs and how they reach its device.  It must not know kernels or routing.

A name is imported when it is first asked for: torch takes seconds to load, and the command must answer an interrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_format.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__, __all__,
    (
        "trellis_format.extent", "cache", "errors", "expert_shares", "extents", "grid", "layout", "linear", "partition",
        "plan", "preparation", "prepared", "selection", "stage", "staging",
    ),
)  # fmt: skip
