"""Owns which bytes a rank needs and how they reach its device.  It must not know kernels or routing."""

from __future__ import annotations

from trellis_format.extent import TrellisExtent
from trellis_prep.errors import PrepError, PrepTypeError, PrepUnsupportedError, PrepValueError
from trellis_prep.extents import even_extents, rank_extent
from trellis_prep.layout import LAYOUT_VERSION, PreparedLayout, plan_layout
from trellis_prep.prepare import prepare
from trellis_prep.prepared import PreparedExperts
from trellis_prep.staging import TrellisStaging

__all__ = [
    "LAYOUT_VERSION",
    "PrepError",
    "PrepTypeError",
    "PrepUnsupportedError",
    "PrepValueError",
    "PreparedExperts",
    "PreparedLayout",
    "TrellisExtent",
    "TrellisStaging",
    "even_extents",
    "plan_layout",
    "prepare",
    "rank_extent",
]
