"""Owns plans as JSON: what was declared, and what the plan stated of it.  It must not plan.

A document is read by planning its declarations again and comparing: a reader of another version either has the very
plan that was written or is told where they differ.  The version is bumped with any change of meaning.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from trellis_format.activations import Activation
from trellis_format.extent import TrellisExtent
from trellis_format.rate_table import RateTable
from trellis_format.schema import StrictModel
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource
from trellis_format.transform import ExpertTransform
from trellis_kernels.layers import DeviceLimits
from trellis_moe.errors import MoeValueError
from trellis_moe.plan import ExecutionPlan, plan_execution, plan_weights
from trellis_moe.scratch import place
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec
from trellis_moe.variants import Variant

__all__ = ["PLAN_SCHEMA", "PLAN_SCHEMA_VERSION", "PlanDocument", "parse_plan", "plan_document", "plan_schema"]

PLAN_SCHEMA = "trellis-moe/plan"
"""Name of the schema."""
PLAN_SCHEMA_VERSION = 1
"""Version of the schema; bumped with any change of meaning."""


class _Model(StrictModel):
    """An object of the document; JSON types are checked before, so that arrays may become tuples."""

    model_config = ConfigDict(strict=False, frozen=True, extra="forbid")


class LawModel(_Model):
    """An `Activation`; a limit of null is none."""

    kind: str
    limit: float | None
    alpha: float
    beta: float

    @classmethod
    def of(cls, law: Activation) -> LawModel:
        """The model of a law."""
        limit = None if math.isinf(law.limit) else law.limit
        return cls(kind=law.kind, limit=limit, alpha=law.alpha, beta=law.beta)

    def law(self) -> Activation:
        """The law of a model."""
        return Activation(self.kind, math.inf if self.limit is None else self.limit, self.alpha, self.beta)


class ExtentModel(_Model):
    """A `TrellisExtent`."""

    global_intermediate_size: int
    first_slot: int
    slot_count: int


class GeometryModel(_Model):
    """An `ExpertGeometry`."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    padded_hidden_size: int
    padded_intermediate_size: int
    projections: tuple[str, ...]


class TransformModel(_Model):
    """An `ExpertTransform`."""

    pre_block: int
    post_block: int


class SourceModel(_Model):
    """A `TrellisSource`; rates are the integers 2K."""

    codebook: str
    geometry: GeometryModel
    half_bits: tuple[tuple[int, ...], ...]
    layout: str
    extent: ExtentModel
    shared_input_scales: bool
    joint_input_scales: bool
    shared_output_scales: bool
    biased: tuple[str, ...]
    up_divisor: float
    activation: LawModel | None
    expert_transform: TransformModel | None

    @classmethod
    def of(cls, source: TrellisSource) -> SourceModel:
        """The model of a source."""
        geometry, transform = source.geometry, source.expert_transform
        sizes = {name: getattr(geometry, name) for name in GeometryModel.model_fields if name != "projections"}
        return cls(
            codebook=source.codebook,
            geometry=GeometryModel(**sizes, projections=tuple(name.value for name in geometry.projections)),
            half_bits=source.rates.half_bits,
            layout=source.layout.value,
            extent=ExtentModel(**vars(source.extent)),
            shared_input_scales=source.shared_input_scales,
            joint_input_scales=source.joint_input_scales,
            shared_output_scales=source.shared_output_scales,
            biased=tuple(name.value for name in source.biased),
            up_divisor=float(source.up_divisor),
            activation=None if source.activation is None else LawModel.of(source.activation),
            expert_transform=None if transform is None else TransformModel(**vars(transform)),
        )

    def source(self) -> TrellisSource:
        """The source of a model."""
        plain = self.geometry.model_dump() | {"projections": tuple(map(Projection, self.geometry.projections))}
        transform = self.expert_transform
        return TrellisSource(
            codebook=self.codebook,
            geometry=ExpertGeometry(**plain),
            rates=RateTable(self.half_bits),
            layout=CodeLayout(self.layout),
            extent=TrellisExtent(**self.extent.model_dump()),
            shared_input_scales=self.shared_input_scales,
            joint_input_scales=self.joint_input_scales,
            shared_output_scales=self.shared_output_scales,
            biased=tuple(map(Projection, self.biased)),
            up_divisor=self.up_divisor,
            activation=None if self.activation is None else self.activation.law(),
            expert_transform=None if transform is None else ExpertTransform(**transform.model_dump()),
        )


class ActivationModel(_Model):
    """An `ActivationSpec`."""

    nonlinearity: LawModel
    io_dtype: str
    output_dtype: str
    rotation_dtype: str
    arithmetic: str


class RoutingModel(_Model):
    """A `RoutingSpec`."""

    deterministic_output: bool
    apply_router_weight_on_input: bool
    id_dtype: str
    weight_dtype: str


class CapacityModel(_Model):
    """An `ExecutionCapacity`."""

    max_tokens: int
    top_k: int
    token_counts: tuple[int, ...]
    scratch_bound: int | None
    route_experts: int | None


class LimitsModel(_Model):
    """The `DeviceLimits` that kernels were chosen by."""

    arch: str
    multiprocessors: int


class DeclaredModel(_Model):
    """All that a plan is made from."""

    source: SourceModel
    extent: ExtentModel
    activation: ActivationModel
    routing: RoutingModel
    capacity: CapacityModel
    device_type: Literal["cpu", "cuda"]
    limits: LimitsModel | None
    reference: bool


class ScratchModel(_Model):
    """One buffer: its first byte in the arena, and what lies there."""

    name: str
    first: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class RejectedModel(_Model):
    """A path that was not taken; the reason is for readers, and no part of the comparison."""

    path: str
    reason: str


class VariantModel(_Model):
    """One launch."""

    tokens: int
    path: str
    block_rows: int
    arithmetic: str
    reduction: str
    backends: dict[str, str]
    kernels: str | None = Field(description="what the kernels of a fused path are made from, as it evaluates back")
    scratch_nbytes: int
    scratch: tuple[ScratchModel, ...]
    rejected: tuple[RejectedModel, ...]

    @classmethod
    def of(cls, variant: Variant) -> VariantModel:
        """The model of a launch."""
        return cls(
            tokens=variant.tokens,
            path=variant.path,
            block_rows=variant.block_rows,
            arithmetic=variant.arithmetic,
            reduction=variant.reduction,
            backends=dict(variant.backends),
            kernels=None if variant.fused is None else repr(variant.fused),
            scratch_nbytes=variant.scratch_nbytes,
            scratch=tuple(
                ScratchModel(
                    name=spec.buffer.name,
                    first=spec.first,
                    dtype=spec.buffer.dtype,
                    shape=spec.buffer.shape,
                    nbytes=spec.buffer.nbytes,
                )
                for spec in place(variant.tokens, variant.scratch)
            ),
            rejected=tuple(RejectedModel(path=path, reason=reason) for path, reason in variant.rejected),
        )


class StatedModel(_Model):
    """What the plan says of itself: bytes, launches, kernels."""

    prepared_nbytes: int
    scratch_nbytes: int
    direct_token_capacity: int
    reduction: str
    compile_keys: tuple[str, ...]
    variants: tuple[VariantModel, ...]


class PlanDocument(_Model):
    """A plan in a file."""

    schema_name: Literal["trellis-moe/plan"] = Field(alias="schema")
    schema_version: Literal[1]
    declared: DeclaredModel
    stated: StatedModel

    def text(self) -> str:
        """The document as JSON, two spaces a level, keys in the order of the schema."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2)


def plan_document(plan: ExecutionPlan) -> PlanDocument:
    """The document of a plan."""
    limits = plan.limits
    activation = vars(plan.activation) | {"nonlinearity": LawModel.of(plan.activation.nonlinearity)}
    return PlanDocument(
        schema=PLAN_SCHEMA,
        schema_version=PLAN_SCHEMA_VERSION,
        declared=DeclaredModel(
            source=SourceModel.of(plan.weights.source),
            extent=ExtentModel(**vars(plan.weights.extent)),
            activation=ActivationModel(**activation),
            routing=RoutingModel(**vars(plan.routing)),
            capacity=CapacityModel(**vars(plan.capacity)),
            device_type=plan.device_type,
            limits=None if limits is None else LimitsModel(**vars(limits)),
            reference=plan.reference,
        ),
        stated=StatedModel(
            prepared_nbytes=plan.weights.required_nbytes(),
            scratch_nbytes=plan.required_nbytes(),
            direct_token_capacity=plan.direct_token_capacity,
            reduction=plan.reduction,
            compile_keys=tuple(map(repr, plan.compile_keys())),
            variants=tuple(map(VariantModel.of, plan.variants)),
        ),
    )


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan's document."""
    return PlanDocument.model_json_schema(by_alias=True, mode="serialization")


def parse_plan(text: str) -> ExecutionPlan:
    """The plan of a document: its declarations, planned again.

    Args:
        text: from `PlanDocument.text`.

    Raises:
        MoeValueError: if the text is no document of this version, or these declarations are planned otherwise here;
            names the first difference with both values.
        MoeError, FormatError: if a declaration breaks a rule.
    """
    try:
        document = PlanDocument.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise MoeValueError(f"not a plan of schema version {PLAN_SCHEMA_VERSION}: {place}: {first['msg']}") from error
    plan = plan_execution(**_declarations(document.declared))
    difference = _difference("stated", _compared(document.stated), _compared(plan_document(plan).stated))
    if difference:
        raise MoeValueError(f"the document's declarations are planned otherwise here: {difference}")
    return plan


def _declarations(declared: DeclaredModel) -> dict[str, Any]:
    """The arguments of `plan_execution`."""
    law = {"nonlinearity": declared.activation.nonlinearity.law()}
    return {
        "weights": plan_weights(declared.source.source(), TrellisExtent(**declared.extent.model_dump())),
        "activation": ActivationSpec(**declared.activation.model_dump() | law),
        "routing": RoutingSpec(**declared.routing.model_dump()),
        "capacity": ExecutionCapacity(**declared.capacity.model_dump()),
        "device": declared.device_type,
        "limits": None if declared.limits is None else DeviceLimits(**declared.limits.model_dump()),
        "reference": declared.reference,
    }


def _compared(stated: StatedModel) -> Any:
    """What two plans must agree in: all but the words of reasons."""
    return stated.model_dump(mode="json", exclude={"variants": {"__all__": {"rejected"}}})


def _difference(place: str, written: Any, planned: Any) -> str:
    """Where two JSON values first differ, with both; empty where they do not."""
    if written == planned:
        return ""
    if isinstance(written, dict) and isinstance(planned, dict) and written.keys() == planned.keys():
        pairs = ((f"{place}.{key}", written[key], planned[key]) for key in written)
    elif isinstance(written, list) and isinstance(planned, list) and len(written) == len(planned):
        pairs = ((f"{place}[{index}]", *both) for index, both in enumerate(zip(written, planned, strict=True)))
    else:
        return f"{place} is {written!r} in the document and {planned!r} here"
    return next(found for one in pairs if (found := _difference(*one)))
