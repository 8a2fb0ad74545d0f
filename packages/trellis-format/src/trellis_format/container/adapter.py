"""Owns the adapter from a layer of a container to `TrellisSource` and `TrellisWeights`.  It must not decode or cast.

Codes stay a view of the layer's, scales stay float16 bit for bit, and the layer is not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.activations import Activation
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer, check_content, payload_bytes
from trellis_format.container.manifest import ManifestHead
from trellis_format.errors import FormatTypeError, FormatUnsupportedError
from trellis_format.files.boxes import take_box
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.native.config import TrellisConfig, parse_config
from trellis_format.rate_table import RateTable
from trellis_format.source import CodeLayout, ExpertGeometry, TrellisSource, TrellisWeights
from trellis_format.transform import ExpertTransform

__all__ = ["config_of", "trellis_from_container"]


def trellis_from_container(
    layer: ContainerLayer | ContainerPairLayer,
    *,
    activation: Activation | None = None,
    up_divisor: float | None = None,
    whole: bool = False,
) -> tuple[TrellisSource, TrellisWeights]:
    """Describe a layer of a container without the container.

    Args:
        layer: a layer from `read_layer`, or put together in memory.
        activation: the law between the GEMMs, which the container does not state.
        up_divisor: the number by which the stored up projection was divided; the container does not state it.
        whole: describe a layer to carry, not to compute with: barriers do not matter, and the input vectors of both
            halves of an intermediate Hadamard are rows of the input scales.

    Returns:
        The source and the weights over the layer's extent.

    Raises:
        FormatUnsupportedError: if rates vary over pairs of records ("pair"), whose rows are no tiles of one rate.
        FormatTypeError: if it is no such layer, or as `check_content`.
        FormatValueError: as `check_content`; or if the extent crosses the half boundary under an
            intermediate Hadamard, or cuts a Hadamard block.
    """
    if not isinstance(layer, ContainerLayer | ContainerPairLayer):
        raise FormatTypeError(f"a layer of a container is needed, got {type(layer).__name__}")
    head, rate = layer.head, layer.head.uniform_rate
    if isinstance(layer, ContainerPairLayer) or rate is None:
        kinds = ", ".join(head.rates.pair_kinds or ())
        raise FormatUnsupportedError(f"layer {layer.layer} has pair rates of kinds {kinds}, which are not handled")
    check_content(layer, barriers=not whole)
    transform, geometry = _transform(head), head.geometry
    tables = _inputs(layer, None if whole else transform)
    shared, rates = not head.hadamard.per_expert_input_rotations, RateTable.uniform(rate)
    source = TrellisSource(
        codebook=head.codebook,
        geometry=_geometry(head),
        rates=rates,
        layout=CodeLayout.SLOT_MAJOR,
        extent=layer.extent,
        shared_input_scales=shared,
        joint_input_scales=len(tables) == 1 or transform is not None,
        shared_output_scales=shared,
        up_divisor=1.0 if up_divisor is None else up_divisor,
        activation=activation,
        expert_transform=transform,
    )
    rotations = layer.rotations.transpose(1, 2, 0, 3).reshape(geometry.num_experts, 3, layer.extent.width)
    payload = (slice(0, layer.extent.slot_count), slice(0, int(payload_bytes(layer)[0])))
    weights = TrellisWeights(
        codes=take_box(layer.codes, payload),
        rate=rates.rate_bytes(),
        input_scales=np.stack(tables, axis=-2),
        intermediate_scales=np.ascontiguousarray(rotations),
        output_scales=layer.down_svh,
        biases={},
        expert_sign_patterns=layer.sign_pattern,
    )
    return source, weights


def config_of(head: ManifestHead) -> TrellisConfig:
    """The model-level configuration that a manifest of uniform rate amounts to.

    Raises:
        FormatUnsupportedError: if rates vary over pairs of records.
    """
    if head.rates.pairs:
        raise FormatUnsupportedError(f"pair rates of kinds {', '.join(head.rates.pair_kinds or ())} have no such form")
    side = {"vectors": "per_expert" if head.hadamard.per_expert_input_rotations else "per_layer", "gains": "none"}
    expert: dict[str, Any] = {"kind": "none"}
    if head.hadamard.intermediate_hadamard:
        expert = {
            "kind": "intermediate_hadamard",
            "pre_block_size": head.hadamard.pre_block,
            "post_block_size": head.hadamard.post_block,
            "sign_pattern_granularity": "per_expert",
        }
    return parse_config(
        {
            "version": 2,
            "codebook": head.codebook,
            "rate": {"granularity": "uniform"},
            "scale": {
                "input_scales": side,
                "intermediate_scales": {"vectors": "per_expert", "gains": "none"},
                "output_scales": side,
            },
            "transform": {
                "projection": {"kind": "scaled_hadamard", "block_size": HADAMARD_BLOCK},
                "expert": expert,
            },
        }
    )


def _transform(head: ManifestHead) -> ExpertTransform | None:
    hadamard = head.hadamard
    if hadamard.pre_block is None or hadamard.post_block is None:
        return None
    return ExpertTransform(pre_block=hadamard.pre_block, post_block=hadamard.post_block)


def _geometry(head: ManifestHead) -> ExpertGeometry:
    """The sizes; a container states no true sizes beside the stored ones, so they are the same."""
    hidden, intermediate = head.geometry.hidden_size, head.geometry.intermediate_size
    return ExpertGeometry(
        num_experts=head.geometry.num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        padded_hidden_size=hidden,
        padded_intermediate_size=intermediate,
    )


def _inputs(layer: ContainerLayer, halves: ExpertTransform | None) -> tuple[npt.NDArray[np.float16], ...]:
    """The distinct input vectors, or the one of the half that the extent lies in."""
    gate, up = layer.gate_suh, layer.up_suh
    if halves is not None:
        return ((gate, up)[halves.half(layer.extent)],)
    return (gate,) if _same(gate, up) else (gate, up)


def _same(left: npt.NDArray[np.float16], right: npt.NDArray[np.float16]) -> bool:
    return left is right or np.array_equal(left.view(np.uint16), right.view(np.uint16))
