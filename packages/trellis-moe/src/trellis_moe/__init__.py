"""Owns the planner and the launch API of trellis mixture-of-experts layers.  It must not know file layouts.

plan_weights -> prepare_weights -> plan_execution -> Session.prepare -> bind -> run

A name is imported when it is first asked for: torch takes seconds to load, and the command must answer an interrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_format.lazy import lazy_names

if TYPE_CHECKING:
    from trellis_moe.binding import Binding, bind
    from trellis_moe.errors import (
        MoeDistributedError,
        MoeError,
        MoeMemoryError,
        MoeTypeError,
        MoeUnsupportedError,
        MoeValueError,
    )
    from trellis_moe.lifecycle import prepare_weights
    from trellis_moe.linear import TrellisLinear
    from trellis_moe.module import TrellisMoE
    from trellis_moe.plan import ExecutionPlan, WeightPlan, plan_execution, plan_weights
    from trellis_moe.scratch import ScratchBuffer, ScratchSpec
    from trellis_moe.session import Session
    from trellis_moe.specs import (
        ARITHMETICS,
        ID_DTYPES,
        IO_DTYPES,
        ActivationSpec,
        ExecutionCapacity,
        MoeGeometry,
        RoutingSpec,
    )
    from trellis_moe.variants import Variant

__all__ = [
    "ARITHMETICS",
    "ID_DTYPES",
    "IO_DTYPES",
    "ActivationSpec",
    "Binding",
    "ExecutionCapacity",
    "ExecutionPlan",
    "MoeDistributedError",
    "MoeError",
    "MoeGeometry",
    "MoeMemoryError",
    "MoeTypeError",
    "MoeUnsupportedError",
    "MoeValueError",
    "RoutingSpec",
    "ScratchBuffer",
    "ScratchSpec",
    "Session",
    "TrellisLinear",
    "TrellisMoE",
    "Variant",
    "WeightPlan",
    "bind",
    "plan_execution",
    "plan_weights",
    "prepare_weights",
]

_MODULES = ("errors", "specs", "scratch", "variants", "plan", "session", "lifecycle", "binding", "module", "linear")

__getattr__, __dir__ = lazy_names(__name__, __all__, _MODULES)
