"""Owns the choice of the few-token kernels: from a layer's numbers and a token count to a compile key.

It must not know `cutlass` or weights.  The choice reads the capacity alone, never the routing, so that a row's bits
depend on the plan and not on its neighbours.
"""

from __future__ import annotations

from trellis_format.activations import Activation
from trellis_format.extent import TrellisExtent
from trellis_format.source import Projection, TrellisSource
from trellis_kernels.cute.moe_key import MoeSmallKey, expert_class
from trellis_kernels.cute.moe_tilings import Shape, choose
from trellis_kernels.errors import KernelUnsupportedError

__all__ = ["plan_moe_small"]


def plan_moe_small(
    source: TrellisSource,
    *,
    arch: str,
    max_tokens: int,
    top_k: int,
    multiprocessors: int,
    extent: TrellisExtent | None = None,
    activation: Activation | None = None,
    x_dtype: str = "float16",
    out_dtype: str = "float16",
    weight_dtype: str = "float32",
    id_bytes: int = 8,
    arithmetic: str = "exact",
    route_experts: int | None = None,
) -> MoeSmallKey:
    """The kernels for a layer at a capacity.

    Args:
        source: the layer.
        arch: compile target.
        max_tokens: most tokens of a launch.
        top_k: routes of a token.
        multiprocessors: of the device.
        extent: the rank's share of the intermediate axis (default: the source's).
        activation: the law (default: the source's).
        x_dtype: of x.
        out_dtype: of the result.
        weight_dtype: of the router weights.
        id_bytes: of an id.
        arithmetic: of the products, one of `PRODUCT_ROWS`; "bytes" is faster for mul1 up to about 2 rows of an expert
            and leaves out the law's last rounding.
        route_experts: experts that the routes of all ranks are spread over (default: the source's), so that a rank
            which holds some of them takes the tilings, and gives the bits, of one that holds all.

    Raises:
        KernelUnsupportedError: if no activation is known.
        KernelValueError: if a number is out of range.
    """
    law = activation or source.activation
    if law is None:
        raise KernelUnsupportedError("the layer names no activation; give one")
    geometry = source.geometry
    share = extent or source.extent
    count = len(geometry.projections)
    rates = [[source.rates.rate(expert, p).half_bits for p in range(count)] for expert in range(geometry.num_experts)]
    holds_down_bias = share.first_channel == 0
    biased = tuple(
        projection in source.biased and (projection is not Projection.DOWN or holds_down_bias)
        for projection in Projection
    )
    shape = Shape(
        arch=arch,
        arithmetic=arithmetic,
        codebook=source.codebook,
        padded_hidden=geometry.padded_hidden_size,
        width=share.width,
        num_experts=route_experts or geometry.num_experts,
        top_k=top_k,
    )
    choice = choose(shape, max_tokens=max_tokens, multiprocessors=multiprocessors)
    return MoeSmallKey(
        arch=arch,
        codebook=source.codebook,
        hidden=geometry.hidden_size,
        padded_hidden=geometry.padded_hidden_size,
        width=share.width,
        max_experts=expert_class(geometry.num_experts),
        top_k=top_k,
        gated=geometry.gated,
        up_rates=tuple(sorted({rate for row in rates for rate in row[:-1]})),
        down_rates=tuple(sorted({row[-1] for row in rates})),
        activation=law,
        biased=(biased[0], biased[1], biased[2]),
        shared_inputs=source.shared_input_scales,
        joint_inputs=source.joint_input_scales,
        shared_outputs=source.shared_output_scales,
        x_dtype=x_dtype,
        out_dtype=out_dtype,
        weight_dtype=weight_dtype,
        id_bytes=id_bytes,
        arithmetic=arithmetic,
        row_columns=choice.row_columns,
        direct=choice.direct,
        up=choice.up,
        down=choice.down,
    )
