"""Owns the compile keys of a plan: every kernel that its runs may launch.  It must not compile.

Keys hold what kernels are generated from: arithmetic and io dtypes as prepared, codebook, rates, local widths, laws,
tilings and target.  Token counts below a launch's capacity stay numbers of the launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import OpLayer, layer_keys, op_layer_keys
from trellis_moe.variants import Variant

if TYPE_CHECKING:
    from trellis_moe.plan import ExecutionPlan

__all__ = ["plan_keys"]


def plan_keys(plan: ExecutionPlan) -> tuple[KernelKey, ...]:
    """Every kernel of a plan, each once, in the order of its launches."""
    return tuple(dict.fromkeys(key for variant in plan.variants for key in _variant_keys(plan, variant)))


def _variant_keys(plan: ExecutionPlan, variant: Variant) -> tuple[KernelKey, ...]:
    if variant.fused is not None:
        return layer_keys(variant.fused)
    kernels = tuple(op for op, backend in variant.backends if backend == "cute")
    if not kernels or plan.limits is None or plan.weights.extent.width == 0:
        return ()
    source = plan.weights.source
    layer = OpLayer(
        arch=plan.limits.arch,
        codebook=source.codebook,
        half_bits=tuple(rate.half_bits for rate in source.rates.distinct()),
        num_experts=source.geometry.num_experts,
        activation=plan.activation.nonlinearity,
        x_dtype=plan.activation.io_dtype,
        out_dtype=plan.activation.output_dtype,
        hidden_block=None if source.expert_transform is None else source.expert_transform.pre_block,
    )
    return op_layer_keys(layer, kernels)
