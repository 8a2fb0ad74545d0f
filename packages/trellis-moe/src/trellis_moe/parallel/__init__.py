"""Owns layers on many ranks: who holds what, what the ranks exchange, and in which order it is added.

It must not know file layouts.

    layer_share -> plan_parallel -> prepare_weights -> open_groups -> bind_parallel -> run
"""

from __future__ import annotations

from trellis_moe.parallel.collectives import Ranks, await_device
from trellis_moe.parallel.groups import GridGroups, open_groups
from trellis_moe.parallel.layer import ParallelLayer, bind_parallel
from trellis_moe.parallel.plan import ParallelPlan, plan_parallel
from trellis_moe.parallel.reduction import ReduceSpec
from trellis_moe.parallel.share import LayerShare, expert_grid, layer_share, tensor_grid

__all__ = [
    "GridGroups",
    "LayerShare",
    "ParallelLayer",
    "ParallelPlan",
    "Ranks",
    "ReduceSpec",
    "await_device",
    "bind_parallel",
    "expert_grid",
    "layer_share",
    "open_groups",
    "plan_parallel",
    "tensor_grid",
]
