"""Owns `TrellisConfig`, version 2: what a whole model's trellis weights mean.  It must not know arrays or files.

Codebook, rates and transforms are independent of each other here; what can run together is decided at planning.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trellis_format.codebooks import CODEBOOKS
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.extent import SLOT
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.schema import StrictModel, emit_json, is_power_of_two, parse_model, refuse_key
from trellis_format.transform import ExpertTransform

__all__ = [
    "QUANT_METHOD",
    "BoundaryConfig",
    "ExpertConfig",
    "ProjectionConfig",
    "QuantizationConfig",
    "RateConfig",
    "ScaleConfig",
    "TransformConfig",
    "TrellisConfig",
    "parse_config",
    "parse_quantization_config",
]

QUANT_METHOD = "b12x_trellis"
"""Value of `quant_method`, and the key of the configuration beside it."""

Granularity = Literal["uniform", "per_layer", "per_expert"]


class RateConfig(StrictModel):
    """How rates are given.

    Attributes:
        granularity: what has a rate of its own.
        group_size: channels of a rate group along the intermediate axis, a multiple of 32; None is the whole axis.
    """

    granularity: Literal["uniform", "per_layer", "per_expert", "per_expert_projection"]
    group_size: Annotated[int, Field(gt=0, multiple_of=SLOT)] | None = None

    @property
    def projection_mixed(self) -> bool:
        """Whether the projections of one expert may differ."""
        return self.granularity == "per_expert_projection"

    def model_shape(
        self, num_layers: int, num_experts: int, intermediate_size: int, num_projections: int = 3
    ) -> tuple[int, ...]:
        """Shape of the rate tensor of a whole model.

        Args:
            num_layers: layers with experts.
            num_experts: experts of a layer.
            intermediate_size: channels of the whole intermediate axis.
            num_projections: linears of an expert.

        Raises:
            FormatValueError: if groups do not divide the axis.
        """
        layers = () if self.granularity == "uniform" else (num_layers,)
        return (*layers, *self._inner_shape(num_experts, intermediate_size, num_projections)) or (1,)

    def layer_shape(self, num_experts: int, intermediate_size: int, num_projections: int = 3) -> tuple[int, ...]:
        """Shape of one layer's view of the rate tensor; arguments and errors as `model_shape`."""
        return self._inner_shape(num_experts, intermediate_size, num_projections) or (1,)

    def _inner_shape(self, num_experts: int, intermediate_size: int, num_projections: int) -> tuple[int, ...]:
        experts = () if self.granularity in ("uniform", "per_layer") else (num_experts,)
        projections = (num_projections,) if self.projection_mixed else ()
        if self.group_size is None:
            return (*experts, *projections)
        if intermediate_size % self.group_size:
            raise FormatValueError(
                f"rate.group_size {self.group_size} does not divide the intermediate size {intermediate_size}"
            )
        return (*experts, *projections, intermediate_size // self.group_size)


class BoundaryConfig(StrictModel):
    """What has scales of its own at one boundary.

    Attributes:
        vectors: who has a vector over channels.
        gains: who has a factor on top of it.
    """

    vectors: Granularity
    gains: Literal["none", "uniform", "per_layer", "per_expert"]


class ScaleConfig(StrictModel):
    """The three boundaries: before gate and up, between the two GEMMs, after down."""

    input_scales: BoundaryConfig
    intermediate_scales: BoundaryConfig
    output_scales: BoundaryConfig


class ProjectionConfig(StrictModel):
    """The rotation on both sides of every linear.

    Attributes:
        kind: none, or a blockwise Hadamard between the vectors.
        block_size: its channels, a power of two; only with a Hadamard.
    """

    kind: Literal["none", "scaled_hadamard"]
    block_size: int | None = None

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        _check_needed(self, ("block_size",), needed=self.kind == "scaled_hadamard")
        return self


class ExpertConfig(StrictModel):
    """The change of basis at the activation.

    Attributes:
        kind: none, or the intermediate Hadamard.
        pre_block_size: channels of its blocks over the hidden axis, a power of two.
        post_block_size: channels of its blocks over the intermediate axis, a power of two.
        sign_pattern_granularity: who has a sign pattern.
    """

    kind: Literal["none", "intermediate_hadamard"]
    pre_block_size: int | None = None
    post_block_size: int | None = None
    sign_pattern_granularity: Literal["per_expert"] | None = None

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        keys = ("pre_block_size", "post_block_size", "sign_pattern_granularity")
        _check_needed(self, keys, needed=self.kind == "intermediate_hadamard")
        return self


class TransformConfig(StrictModel):
    """The two transforms."""

    projection: ProjectionConfig
    expert: ExpertConfig


class TrellisConfig(StrictModel):
    """The meaning of a model's trellis weights.

    Attributes:
        version: of this schema.
        codebook: name of the one codebook.
        rate: how rates are given.
        scale: how scales are given.
        transform: what the weights were rotated by.

    Raises:
        FormatTypeError: if a value has another JSON type; names its path.
        pydantic.ValidationError: if a key is unknown or missing or a value is wrong.
    """

    version: Literal[2]
    codebook: str
    rate: RateConfig
    scale: ScaleConfig
    transform: TransformConfig

    @field_validator("codebook")
    @classmethod
    def _check_codebook(cls, name: str) -> str:
        if name not in CODEBOOKS:
            raise ValueError(f"unknown codebook; known: {', '.join(CODEBOOKS)}")
        return name

    def to_json(self) -> dict[str, Any]:
        """The JSON object, equal to the one that was parsed."""
        return emit_json(self)

    def quantization_config(self) -> dict[str, Any]:
        """The object that a model's `config.json` holds as `quantization_config`."""
        return {"quant_method": QUANT_METHOD, QUANT_METHOD: self.to_json()}

    def expert_transform(self) -> ExpertTransform | None:
        """The intermediate Hadamard of the experts, or None.

        Raises:
            FormatUnsupportedError: if rates come in groups, or the transforms are others than a scaled Hadamard of
                128 and an intermediate Hadamard of 512 and 128.
        """
        if self.rate.group_size is not None:
            raise FormatUnsupportedError(f"rates in groups of {self.rate.group_size} channels are not handled")
        projection, expert = self.transform.projection, self.transform.expert
        if projection.kind != "scaled_hadamard" or projection.block_size != HADAMARD_BLOCK:
            size = f" of {projection.block_size}" if projection.block_size else ""
            raise FormatUnsupportedError(
                f"projection transform {projection.kind}{size} is not handled; supported: scaled_hadamard of "
                f"{HADAMARD_BLOCK}"
            )
        if expert.pre_block_size is None or expert.post_block_size is None:
            return None
        return ExpertTransform(pre_block=expert.pre_block_size, post_block=expert.post_block_size)


class QuantizationConfig(StrictModel):
    """The object `quantization_config` of a model's `config.json`: exactly these two keys."""

    quant_method: Literal["b12x_trellis"]
    b12x_trellis: TrellisConfig


def parse_config(data: Any, *, file: str | os.PathLike[str] | None = None) -> TrellisConfig:
    """Validate a parsed `TrellisConfig`.

    Raises:
        FormatTypeError: if a value has the wrong JSON type; names its path.
        FormatValueError: if a key is unknown or missing, or a value is wrong; names its path.
    """
    return parse_model(TrellisConfig, data, file=file)


def parse_quantization_config(data: Any, *, file: str | os.PathLike[str] | None = None) -> TrellisConfig:
    """Validate a parsed `quantization_config` with its two keys; raises as `parse_config`."""
    return parse_model(QuantizationConfig, data, file=file).b12x_trellis


def _check_needed(model: ProjectionConfig | ExpertConfig, keys: tuple[str, ...], *, needed: bool) -> None:
    for key in keys:
        value = getattr(model, key)
        if needed and value is None:
            raise refuse_key(key, f"missing key; kind {model.kind!r} needs it")
        if not needed and value is not None:
            raise refuse_key(key, f"unknown key for kind {model.kind!r}")
        if isinstance(value, int) and not is_power_of_two(value):
            raise refuse_key(key, f"must be a power of two, got {value}")
