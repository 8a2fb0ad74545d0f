"""Owns the planner and the launch API of trellis mixture-of-experts layers.  It must not know file layouts.

plan_weights -> prepare_weights -> plan_execution -> bind -> run
"""

from __future__ import annotations

from trellis_moe.binding import Binding, bind
from trellis_moe.errors import MoeError, MoeTypeError, MoeUnsupportedError, MoeValueError
from trellis_moe.lifecycle import prepare_weights
from trellis_moe.plan import ExecutionPlan, WeightPlan, plan_execution, plan_weights
from trellis_moe.scratch import ScratchBuffer
from trellis_moe.specs import ID_DTYPES, IO_DTYPES, ActivationSpec, ExecutionCapacity, RoutingSpec

__all__ = [
    "ID_DTYPES",
    "IO_DTYPES",
    "ActivationSpec",
    "Binding",
    "ExecutionCapacity",
    "ExecutionPlan",
    "MoeError",
    "MoeTypeError",
    "MoeUnsupportedError",
    "MoeValueError",
    "RoutingSpec",
    "ScratchBuffer",
    "WeightPlan",
    "bind",
    "plan_execution",
    "plan_weights",
    "prepare_weights",
]
