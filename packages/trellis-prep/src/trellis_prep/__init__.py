"""Owns which bytes a rank needs and how they reach its device.  It must not know kernels or routing."""

from __future__ import annotations

from trellis_format.extent import TrellisExtent
from trellis_prep.cache import CacheWarning, PreparedCache
from trellis_prep.errors import (
    PrepDeviceError,
    PrepError,
    PrepMemoryError,
    PrepReadError,
    PrepStateError,
    PrepTypeError,
    PrepUnsupportedError,
    PrepValueError,
)
from trellis_prep.expert_ranges import expert_map, expert_ranges
from trellis_prep.extents import check_extent, even_extents, rank_extent
from trellis_prep.grid import RankGrid, RankShare
from trellis_prep.layout import LAYOUT_VERSION, PreparedLayout, plan_layout
from trellis_prep.partition import balanced_extents, partition_extents
from trellis_prep.plan import PreparationPlan, plan_preparation
from trellis_prep.prepare import prepare
from trellis_prep.prepared import PreparedExperts
from trellis_prep.selection import select_experts
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
    "PrepUnsupportedError",
    "PrepValueError",
    "PreparationPlan",
    "PreparedCache",
    "PreparedExperts",
    "PreparedLayout",
    "RankGrid",
    "RankShare",
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
    "rank_extent",
    "select_experts",
]
