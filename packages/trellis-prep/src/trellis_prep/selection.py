"""Owns the choice of some experts of a layer, for ranks that hold whole experts.  It must not move bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trellis_format.linear_reader import linear_view
from trellis_format.rate_table import RateTable
from trellis_format.slots import section_offsets
from trellis_format.source import CodeLayout, TrellisSource, TrellisWeights
from trellis_prep.errors import PrepValueError
from trellis_prep.expert_shares import expert_map
from trellis_prep.layout import check_source

__all__ = ["select_experts"]


def select_experts(
    source: TrellisSource, weights: TrellisWeights, experts: Sequence[int]
) -> tuple[TrellisSource, TrellisWeights]:
    """A layer of some of a layer's experts, in the given order.

    Codes stay where they are; slot-major rows, which hold all experts, are read through one array per linear.  Tables
    keep the granularity that the source declares, also for a single expert.  Local ids are the places in `experts`;
    `expert_map` gives them for routing.

    Args:
        source: the layer.
        weights: its arrays.
        experts: ids to keep, at least one, each once.

    Raises:
        PrepTypeError: if an id is not an int.
        PrepValueError: if there is none, or one is outside the layer or named twice.
    """
    check_source(source)
    geometry, chosen = source.geometry, list(experts)
    if not chosen:
        raise PrepValueError(f"a rank that holds none of {geometry.num_experts} experts has nothing to prepare")
    expert_map(geometry.num_experts, chosen)
    table = source.rates.half_bits
    rates = RateTable(tuple(table[expert] for expert in chosen)) if len(table) > 1 else source.rates
    selected = dataclasses.replace(
        source,
        geometry=dataclasses.replace(geometry, num_experts=len(chosen)),
        rates=rates,
        layout=CodeLayout.EXL3_LINEAR,
    )
    projections = range(len(geometry.projections))
    offsets = section_offsets(source) if source.layout is CodeLayout.SLOT_MAJOR else None
    patterns = weights.expert_sign_patterns
    neighbours = isinstance(experts, range) and experts.step == 1
    rows = slice(chosen[0], chosen[-1] + 1) if neighbours else chosen  # neighbours stay views
    return selected, dataclasses.replace(
        weights,
        codes=tuple(
            tuple(linear_view(source, weights, expert, index, offsets) for index in projections) for expert in chosen
        ),
        rate=rates.rate_bytes(),
        input_scales=weights.input_scales if source.shared_input_scales else weights.input_scales[rows],
        intermediate_scales=weights.intermediate_scales[rows],
        output_scales=weights.output_scales if source.shared_output_scales else weights.output_scales[rows],
        biases={projection: bias[rows] for projection, bias in weights.biases.items()},
        expert_sign_patterns=None if patterns is None else patterns[rows],
    )
