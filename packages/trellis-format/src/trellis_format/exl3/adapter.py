"""Owns the adapter from EXL3 linears of one layer to `TrellisSource` and `TrellisWeights`.  It must not decode or cast.

Codes stay views of the file; scales stay float16 bit for bit.  Vectors that are bitwise equal over all experts, or
over gate and up, are stored once, because equal input vectors let one rotated activation serve several GEMMs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.activations import Activation
from trellis_format.container.adapter import trellis_from_container
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer
from trellis_format.errors import FormatTypeError, FormatUnsupportedError
from trellis_format.exl3.layers import Exl3Layer
from trellis_format.exl3.linear import Exl3Linear
from trellis_format.extent import TrellisExtent
from trellis_format.model_config import true_width
from trellis_format.rate_table import RateTable
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights

__all__ = ["layer_geometry", "single_codebook", "trellis_from_exl3"]

_Half = npt.NDArray[np.float16]


def trellis_from_exl3(
    layer: Exl3Layer | ContainerLayer | ContainerPairLayer,
    *,
    activation: Activation | None = None,
    up_divisor: float | None = None,
) -> tuple[TrellisSource, TrellisWeights]:
    """Describe one layer of EXL3 experts without its container.

    Args:
        layer: a layer from `find_layer`, or one of an `exl3-v1` container from `trellis_format.container.read_layer`.
        activation: overrides what the model's configuration says.
        up_divisor: overrides the number by which the model's architecture divides up before it is quantised.

    Returns:
        The source, and the weights over the whole intermediate axis, or over the extent of a container's layer.  Codes
        are views; scales, biases and markers are read.

    Raises:
        FormatTypeError: if `layer` is neither.
        FormatUnsupportedError: if the layer mixes codebooks, lists the first tensor of each; or if a container's layer
            has pair rates.
        FormatValueError: if a marker has a foreign multiplier or a scale is not finite; or a container's layer does not
            fit its manifest.
    """
    if isinstance(layer, ContainerLayer | ContainerPairLayer):
        return trellis_from_container(layer, activation=activation, up_divisor=up_divisor)
    if not isinstance(layer, Exl3Layer):
        raise FormatTypeError(f"expected an Exl3Layer or a ContainerLayer, got {type(layer).__name__}")
    return _trellis_from_linears(layer, activation, up_divisor)


def _trellis_from_linears(
    layer: Exl3Layer, activation: Activation | None, up_divisor: float | None
) -> tuple[TrellisSource, TrellisWeights]:
    codebook = single_codebook(layer)
    for row in layer.experts:
        for linear in row.values():
            linear.check_marker()
    projections = layer.projections
    first = projections[:-1]
    inputs = np.stack([np.stack([row[name].read_input_scale() for name in first]) for row in layer.experts])
    intermediate = np.stack([_intermediate_scales(row, projections) for row in layer.experts])
    outputs = np.stack([row[Projection.DOWN].read_output_scale() for row in layer.experts])
    joint = len(first) > 1 and all(_equal_rows(expert) for expert in inputs)
    if joint:
        inputs = inputs[:, :1]
    shared_input, shared_output = _equal_rows(inputs), _equal_rows(outputs)
    biases = _biases(layer)
    rates = RateTable.of([[row[name].rate for name in projections] for row in layer.experts])
    geometry = layer_geometry(layer)
    source = TrellisSource(
        codebook=codebook,
        geometry=geometry,
        rates=rates,
        layout=CodeLayout.EXL3_LINEAR,
        extent=TrellisExtent.whole(geometry.padded_intermediate_size),
        shared_input_scales=shared_input,
        joint_input_scales=joint,
        shared_output_scales=shared_output,
        biased=tuple(biases),
        up_divisor=layer.config.up_divisor(layer.key.index) if up_divisor is None else up_divisor,
        activation=activation or layer.config.activation(),
    )
    weights = TrellisWeights(
        codes=tuple(tuple(row[name].trellis for name in projections) for row in layer.experts),
        rate=rates.rate_bytes(),
        input_scales=inputs[0] if shared_input else inputs,
        intermediate_scales=intermediate,
        output_scales=outputs[0] if shared_output else outputs,
        biases=biases,
    )
    return source, weights


def layer_geometry(layer: Exl3Layer) -> ExpertGeometry:
    """The sizes of a layer: stored sizes from the tensors, true sizes from the configuration where they agree.

    A configured width is taken when rounding it up to 128 gives the stored one; otherwise the stored width is the
    true one.
    """
    down = layer.experts[0][Projection.DOWN]
    return ExpertGeometry(
        num_experts=len(layer.experts),
        hidden_size=true_width(down.n, layer.config.hidden_sizes()),
        intermediate_size=true_width(down.k, layer.config.expert_widths()),
        padded_hidden_size=down.n,
        padded_intermediate_size=down.k,
        projections=layer.projections,
    )


def single_codebook(layer: Exl3Layer) -> str:
    """The name of the one codebook of a layer.

    Raises:
        FormatUnsupportedError: if its linears have several; lists the first tensor of each.
    """
    found: dict[str, str] = {}
    for row in layer.experts:
        for linear in row.values():
            found.setdefault(linear.codebook.name, linear.name)
    if len(found) > 1:
        table = "; ".join(f"{name}: {tensor}" for name, tensor in found.items())
        raise FormatUnsupportedError(
            f"layer {layer.key.index} mixes codebooks, one codebook per layer is supported (first of each: {table})",
            file=layer.file,
        )
    return next(iter(found))


def _intermediate_scales(row: dict[Projection, Exl3Linear], projections: tuple[Projection, ...]) -> _Half:
    vectors = [row[name].read_output_scale() for name in projections[:-1]]
    return np.stack([*vectors, row[Projection.DOWN].read_input_scale()])


def _equal_rows(rows: _Half) -> bool:
    bits = np.ascontiguousarray(rows).view(np.uint16)
    return bool((bits == bits[:1]).all())


def _biases(layer: Exl3Layer) -> dict[Projection, _Half]:
    biases = {}
    for projection in layer.projections:
        rows = [row[projection].read_bias() for row in layer.experts]
        present = [row for row in rows if row is not None]
        if present:
            biases[projection] = np.stack(present)
    return biases
