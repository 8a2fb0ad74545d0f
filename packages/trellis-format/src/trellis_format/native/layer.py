"""Owns one layer of native trellis weights, and what it is without its container: source and weights.

It must not read files, decode or cast; the one thing computed is the product of vectors and gains, where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import SLOT, TrellisExtent
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.files.host import as_array, as_view
from trellis_format.native.config import TrellisConfig
from trellis_format.native.scales import Boundary, ScaleFactors, resolve_scales
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.signs import check_patterns
from trellis_format.slots import row_bytes
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights

__all__ = ["NativeLayer", "rates_of", "source_of", "trellis_from_native"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeLayer:
    """One layer over an extent.  Arrays of other libraries are taken without a copy.

    Attributes:
        config: the model's configuration.
        geometry: sizes.
        extent: the share of the intermediate axis that the arrays hold.
        codes: `[slots, row_bytes] uint8`, rows of exactly the bytes of their tiles.
        rate: the layer's view of the rate tensor, `[1]`, `[experts]` or `[experts, projections] uint8`.
        input_scales: rows for gate and up, or one for both.
        intermediate_scales: rows for every projection.
        output_scales: one row.
        expert_sign_patterns: `[experts] uint8`, 0 to 7, with an intermediate Hadamard; else None.
        biases: `{projection: [experts, n] float16}`, n over the extent for gate and up.
        up_divisor: the number by which up was divided.
        activation: law between the GEMMs, None where the model's own configuration states it.
        uniform_bits: K that the caller expects of every tile, held against the rate tensor; or None.
    """

    config: TrellisConfig
    geometry: ExpertGeometry
    extent: TrellisExtent
    codes: ArrayView
    rate: npt.NDArray[np.uint8]
    input_scales: ScaleFactors
    intermediate_scales: ScaleFactors
    output_scales: ScaleFactors
    expert_sign_patterns: npt.NDArray[np.uint8] | None = None
    biases: Mapping[Projection, npt.NDArray[np.float16]] = field(default_factory=dict)
    up_divisor: float = 1.0
    activation: Activation | None = None
    uniform_bits: int | float | Rate | None = None

    def __post_init__(self) -> None:
        for name, wanted in (("config", TrellisConfig), ("geometry", ExpertGeometry), ("extent", TrellisExtent)):
            if not isinstance(getattr(self, name), wanted):
                found = type(getattr(self, name)).__name__
                raise FormatTypeError(f"{name} of a layer must be {wanted.__name__}, got {found}")
        for boundary in Boundary:
            if not isinstance(getattr(self, boundary.value), ScaleFactors):
                kind = type(getattr(self, boundary.value)).__name__
                raise FormatTypeError(f"{boundary} must be ScaleFactors, got {kind}")
        object.__setattr__(self, "codes", as_view("codes", self.codes))
        object.__setattr__(self, "rate", as_array("rate", self.rate))
        if self.expert_sign_patterns is not None:
            patterns = as_array("sign_pattern", self.expert_sign_patterns)
            object.__setattr__(self, "expert_sign_patterns", patterns)


def source_of(
    described: TrellisConfig | TrellisSource,
    *,
    geometry: ExpertGeometry | None = None,
    rate: npt.NDArray[np.uint8] | None = None,
    uniform_bits: int | float | Rate | None = None,
    extent: TrellisExtent | None = None,
    shared_input_scales: bool | None = None,
    joint_input_scales: bool = False,
    biased: tuple[Projection, ...] = (),
    up_divisor: float = 1.0,
    activation: Activation | None = None,
) -> TrellisSource:
    """A source, whether one is given or a bare configuration.

    Args:
        described: a source, returned as it is, or a configuration.
        geometry: sizes; needed with a configuration.
        rate: the layer's view of the rate tensor; needed with a configuration unless `uniform_bits` is given.
        uniform_bits: K of every tile; only where the configuration's rates are uniform.
        extent: the share of the intermediate axis (default: all of it).
        shared_input_scales: whether experts share input vectors (default: what the configuration declares).
        joint_input_scales: whether gate and up share one input vector.
        biased: the projections that have a bias.
        up_divisor: the number by which up was divided.
        activation: law between the GEMMs.

    Raises:
        FormatTypeError: if `described` is neither, or an argument has the wrong type.
        FormatValueError: if sizes or rates are missing, `uniform_bits` is given where rates are not uniform, is not
            legal for the codebook, or differs from the rate tensor ("observed"); or as `TrellisSource`.
        FormatUnsupportedError: if the configuration has rate groups, or transforms that are not handled.
    """
    if isinstance(described, TrellisSource):
        return described
    if not isinstance(described, TrellisConfig):
        kind = type(described).__name__
        raise FormatTypeError(f"expected a TrellisConfig or a TrellisSource, got {kind}")
    if geometry is None:
        raise FormatValueError("a TrellisConfig has no sizes; give the geometry")
    scale = described.scale
    own_inputs = "per_expert" in (scale.input_scales.vectors, scale.input_scales.gains)
    return TrellisSource(
        codebook=described.codebook,
        geometry=geometry,
        rates=rates_of(described, geometry, rate, uniform_bits),
        layout=CodeLayout.SLOT_MAJOR,
        extent=extent or TrellisExtent.whole(geometry.padded_intermediate_size),
        shared_input_scales=not own_inputs if shared_input_scales is None else shared_input_scales,
        joint_input_scales=joint_input_scales,
        shared_output_scales="per_expert" not in (scale.output_scales.vectors, scale.output_scales.gains),
        biased=biased,
        up_divisor=up_divisor,
        activation=activation,
        expert_transform=described.expert_transform(),
    )


def rates_of(
    config: TrellisConfig,
    geometry: ExpertGeometry,
    rate: npt.NDArray[np.uint8] | None,
    uniform_bits: int | float | Rate | None = None,
) -> RateTable:
    """The rates of a layer, from its rate tensor, from K, or from both where they agree.

    Raises:
        FormatTypeError: if an argument has the wrong type.
        FormatUnsupportedError: if rates come in groups.
        FormatValueError: if both are missing, the tensor has not the shape of the configured granularity, a byte is
            illegal or asymmetric, or K is not legal for the codebook, for the granularity, or not what the tensor has.
    """
    config.expert_transform()
    expected = None if uniform_bits is None else _uniform_rate(config, uniform_bits)
    if rate is None:
        if expected is None:
            raise FormatValueError("rates are missing; give the rate tensor or uniform_bits")
        return RateTable.uniform(expected)
    projections = len(geometry.projections)
    shape = config.rate.layer_shape(geometry.num_experts, geometry.padded_intermediate_size, projections)
    if rate.shape != shape:
        raise FormatValueError(
            f"rate must have shape {list(shape)} for granularity {config.rate.granularity}, got {list(rate.shape)}"
        )
    table = RateTable.from_bytes(rate)
    for found in table.distinct():
        get_codebook(config.codebook).check_rate(found)
    if expected is not None and table != RateTable.uniform(expected):
        observed = ", ".join(map(str, table.distinct()))
        raise FormatValueError(f"uniform_bits is {expected}, observed in the rate tensor: {observed}")
    return table


def trellis_from_native(
    layer: NativeLayer, *, activation: Activation | None = None, whole: bool = False
) -> tuple[TrellisSource, TrellisWeights]:
    """Describe a native layer without its container.

    Args:
        layer: a layer from `read_layer`, or put together in memory.
        activation: overrides the law between the GEMMs that the layer states.
        whole: describe a layer that is to be carried, not computed with: under an intermediate Hadamard with two
            input vectors both are rows of the input scales, each for its half of the slots.

    Returns:
        The source and the weights over the layer's extent; codes are a view, and scales too where they have no gains.

    Raises:
        FormatTypeError: if `layer` is not a native layer, or a dtype of scales or signs is wrong.
        FormatUnsupportedError: if the configuration has rate groups, or transforms that are not handled.
        FormatValueError: if a shape, a rate or a value does not fit the configuration and the geometry.
    """
    if not isinstance(layer, NativeLayer):
        raise FormatTypeError(f"expected a NativeLayer, got {type(layer).__name__}")
    config, geometry, scale = layer.config, layer.geometry, layer.config.scale
    experts, projections, hidden = geometry.num_experts, len(geometry.projections), geometry.padded_hidden_size
    inputs, shared = resolve_scales(
        Boundary.INPUT, layer.input_scales, scale.input_scales, experts, projections - 1, hidden
    )
    intermediate, _ = resolve_scales(
        Boundary.INTERMEDIATE, layer.intermediate_scales, scale.intermediate_scales, experts, projections,
        layer.extent.width,
    )  # fmt: skip
    outputs, _ = resolve_scales(Boundary.OUTPUT, layer.output_scales, scale.output_scales, experts, 1, hidden)
    transform = config.expert_transform()
    if transform is not None and inputs.shape[-2] == 2 and not whole:
        half = transform.half(layer.extent)
        inputs = inputs[..., half : half + 1, :]
    source = source_of(
        config,
        geometry=geometry,
        rate=layer.rate,
        uniform_bits=layer.uniform_bits,
        extent=layer.extent,
        shared_input_scales=shared,
        joint_input_scales=inputs.shape[-2] == 1 or transform is not None,
        biased=tuple(name for name in geometry.projections if name in layer.biases),
        up_divisor=layer.up_divisor,
        activation=activation or layer.activation,
    )
    _check_codes(source, layer.codes)
    _check_signs(source, layer.expert_sign_patterns)
    _check_biases(source, layer.biases)
    weights = TrellisWeights(
        codes=layer.codes,
        rate=layer.rate,
        input_scales=inputs,
        intermediate_scales=np.broadcast_to(intermediate, (experts, projections, layer.extent.width)),
        output_scales=outputs[..., 0, :],
        biases=dict(layer.biases),
        expert_sign_patterns=layer.expert_sign_patterns,
    )
    return source, weights


def _uniform_rate(config: TrellisConfig, bits: int | float | Rate) -> Rate:
    if isinstance(bits, bool) or not isinstance(bits, int | float | Rate):
        raise FormatTypeError(f"uniform_bits must be a number or a Rate, got {type(bits).__name__}")
    if config.rate.granularity != "uniform":
        raise FormatValueError(f"uniform_bits {bits} needs rates that are uniform, they are {config.rate.granularity}")
    rate = bits if isinstance(bits, Rate) else Rate.of(bits)
    get_codebook(config.codebook).check_rate(rate)
    return rate


def _check_codes(source: TrellisSource, codes: ArrayView) -> None:
    if codes.dtype != np.uint8:
        raise FormatValueError(f"codes must be uint8, got {codes.dtype}")
    if len(codes.shape) != 2:
        raise FormatValueError(f"codes must be 2-D [slots, row_bytes], got shape {list(codes.shape)}")
    if isinstance(codes, MemoryArray) and codes.read().size and codes.read().strides[1] != 1:
        raise FormatValueError(f"codes must have contiguous rows, got strides {codes.read().strides}")
    slots, width = source.extent.slot_count, row_bytes(source)
    if codes.shape[0] != slots:
        raise FormatValueError(f"codes have {codes.shape[0]} rows, one for each slot of {SLOT} channels, not {slots}")
    if codes.shape[1] != width:
        raise FormatValueError(f"rows of codes have {codes.shape[1]} bytes, their payload is exactly {width}")


def _check_signs(source: TrellisSource, patterns: npt.NDArray[np.uint8] | None) -> None:
    if source.expert_transform is None:
        if patterns is not None:
            raise FormatValueError("sign_pattern without an intermediate Hadamard in the configuration")
    elif patterns is None:
        raise FormatValueError("sign_pattern is required with the intermediate Hadamard")
    else:
        check_patterns(patterns, source.geometry.num_experts)


def _check_biases(source: TrellisSource, biases: Mapping[Projection, npt.NDArray[np.float16]]) -> None:
    for projection, bias in biases.items():
        hidden = projection is Projection.DOWN
        channels = source.geometry.padded_hidden_size if hidden else source.extent.width
        shape = (source.geometry.num_experts, channels)
        if bias.dtype != np.float16:
            raise FormatTypeError(f"bias of {projection} must be float16, got {bias.dtype}")
        if bias.shape != shape:
            raise FormatValueError(f"bias of {projection} must have shape {list(shape)}, got {list(bias.shape)}")
        if not np.isfinite(bias).all():
            index = [int(place) for place in np.argwhere(~np.isfinite(bias))[0]]
            raise FormatValueError(f"bias of {projection} must be finite, got {bias[tuple(index)]} at {index}")
