"""Owns the shape of an inspection report: what a machine reads from `trellis-format inspect --json`.

It must not know how a report is made or shown.  The schema is versioned: a field that is removed or changes its
meaning raises `schema_version`.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "ActivationSummary",
    "BitsByClass",
    "BitsPerWeight",
    "BytesByClass",
    "Finding",
    "InspectReport",
    "LayerSummary",
    "ModelSummary",
    "ProjectionSummary",
    "Report",
    "Severity",
    "ShardSummary",
    "Skipped",
    "StatedValue",
    "TensorParallel",
    "Transforms",
]

SCHEMA: Final = "trellis-format/inspect"
"""Name of the schema."""
SCHEMA_VERSION: Final = 1
"""Version of the schema."""


class _Part(BaseModel):
    # `model_type` is a key of the configurations that are reported, no name of pydantic's.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Report(_Part):
    """A whole report, which goes out as JSON; a subclass has its fields."""

    model_config = ConfigDict(populate_by_name=True)

    def to_json(self) -> str:
        """The report as indented ASCII JSON, which no terminal takes for anything else."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2, ensure_ascii=True)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of `to_json`."""
        return cls.model_json_schema(by_alias=True, mode="serialization")


class Severity(StrEnum):
    """What a finding means for a reader."""

    ERROR = "error"
    """A rule is broken: reading the tensor or the layer is refused."""
    WARNING = "warning"
    """Two sources disagree or something is left over; the tensors are taken as they are."""
    NOTE = "note"
    """Worth knowing, nothing is wrong."""


class Finding(_Part):
    """One thing that was noticed.

    Attributes:
        code: what kind of thing, stable between versions.
        severity: what it means for a reader.
        message: the fact, both values and the rule.
        file: path of the file, or None.
        tensor: name of the tensor or module, or None.
        numbers: the numbers of the message by what they are, such as `observed` and `expected`; empty without any.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    numbers: dict[str, int | float] = {}


class ShardSummary(_Part):
    """One safetensors file: its name, bytes of its tensors, number of its tensors."""

    name: str
    bytes: int
    tensors: int


class StatedValue(_Part):
    """What a configuration file states: path of the file, path of the key, value as text."""

    file: str
    field: str
    value: str


class ActivationSummary(_Part):
    """The law between the GEMMs; `limit` is None where there is none, `source` is the key that states it."""

    kind: str
    limit: float | None
    alpha: float
    beta: float
    source: str


class ModelSummary(_Part):
    """What `config.json` says about the model; None where it does not say."""

    model_type: str | None
    architectures: tuple[str, ...]
    hidden_size: int | None
    num_experts: int | None
    top_k: int | None
    activation: ActivationSummary | None


class BitsPerWeight(_Part):
    """Bits per weight of a set of linears.

    Attributes:
        linears: number of linears.
        weights: stored weights, k * n with padding.
        codes: bits of codes per stored weight, the average K; None without linears.
        total: bits of all tensors of the linears per stored weight; None without linears.
    """

    linears: int
    weights: int
    codes: float | None
    total: float | None


class BitsByClass(_Part):
    """Bits per weight of the whole model's quantised linears and of parts of it."""

    model: BitsPerWeight
    experts: BitsPerWeight
    shared_experts: BitsPerWeight
    linears: BitsPerWeight
    head: BitsPerWeight


class BytesByClass(_Part):
    """Bytes of all tensors by what they belong to.

    Attributes:
        experts: routed experts, also where they are not quantised.
        shared_experts: experts that every token takes.
        linears: other EXL3 linears, such as attention and dense layers.
        head: the projection to the vocabulary.
        embeddings: token embeddings.
        others: norms, routers and whatever else is not quantised.
        total: the sum.
    """

    experts: int
    shared_experts: int
    linears: int
    head: int
    embeddings: int
    others: int
    total: int


class ProjectionSummary(_Part):
    """One projection over the experts of a layer.

    Attributes:
        projection: gate, up or down.
        shapes: number of experts by "k x n", in stored channels.
        rates: number of experts by K.
        codebooks: number of experts by codebook.
        biased: number of experts with a bias.
        bytes: bytes of all tensors; in a container of layer files those of its codes, None where pairs of records
            differ in K.
    """

    projection: str
    shapes: dict[str, int]
    rates: dict[str, int]
    codebooks: dict[str, int]
    biased: int
    bytes: int | None


class TensorParallel(_Part):
    """How the intermediate axis divides over ranks.

    Attributes:
        blocks: blocks of 128 channels.
        even: world sizes that give each rank the same number of blocks, by cuts that the container allows.
        largest: largest world size without an empty rank; 0 where the container allows no cut.
        alignment_slots: slots of 32 channels that every cut is a multiple of.
        barriers: slots that no rank's share may reach across.
    """

    blocks: int
    even: tuple[int, ...]
    largest: int
    alignment_slots: int
    barriers: tuple[int, ...] = ()


class LayerSummary(_Part):
    """The routed experts of one layer; sizes are channels, and None where the layer is broken.

    Attributes:
        index: index of the layer.
        prefix: path of its experts; empty where a container of layer files does not say.
        auxiliary: whether it belongs to a multi-token-prediction head.
        readable: whether the layer can be described and run: False where a finding of severity error concerns it, or
            the finding `not-described`.
        experts: number of experts that are present.
        hidden_size: channels that an expert takes and gives.
        padded_hidden_size: hidden channels as stored.
        intermediate_size: channels between the GEMMs.
        padded_intermediate_size: intermediate channels as stored.
        projections: in order.
        bits: bits per weight.
        bytes: bytes of all tensors.
        up_divisor: the number by which up was divided before it was quantised.
        tensor_parallel: how the intermediate axis divides.
        pair_kinds: kinds of pairs of records whose K differ, where there are any.
        file: name of its layer file, None without one.
        sha256: digest of that file as the manifest states it; it is not computed.
    """

    index: int
    prefix: str
    auxiliary: bool
    readable: bool
    experts: int
    hidden_size: int | None
    padded_hidden_size: int | None
    intermediate_size: int | None
    padded_intermediate_size: int | None
    projections: tuple[ProjectionSummary, ...]
    bits: BitsPerWeight
    bytes: int
    up_divisor: float
    tensor_parallel: TensorParallel | None
    pair_kinds: tuple[str, ...] = ()
    file: str | None = None
    sha256: str | None = None


class Transforms(_Part):
    """How weights are rotated.

    Attributes:
        kind: of the rotation on both sides of every linear.
        block_size: its channels, 0 without one.
        linears_with_vectors: number of linears with vectors.
        linears_with_packed_signs: number of linears with packed signs.
        expert: the change of basis at the activation, in words; None without one.
    """

    kind: str
    block_size: int
    linears_with_vectors: int
    linears_with_packed_signs: int
    expert: str | None = None


class Skipped(_Part):
    """Tensors that are not read as linears, grouped by name with numbers as `*`.

    Attributes:
        reason: stable word for why.
        explanation: why, in words.
        pattern: name with each index as `*`.
        dtypes: dtypes that occur.
        tensors: number of tensors.
        bytes: bytes of them.
        example: name of one of them.
    """

    reason: str
    explanation: str
    pattern: str
    dtypes: tuple[str, ...]
    tensors: int
    bytes: int
    example: str


class InspectReport(Report):
    """All that headers and configurations of a checkpoint tell."""

    schema_name: Literal["trellis-format/inspect"] = Field(default=SCHEMA, alias="schema")
    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: str
    path: str
    container: str = "exl3"
    shards: tuple[ShardSummary, ...]
    model: ModelSummary
    stated: tuple[StatedValue, ...]
    layers: tuple[LayerSummary, ...]
    bits_per_weight: BitsByClass
    bytes: BytesByClass
    transforms: Transforms
    skipped: tuple[Skipped, ...]
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        """Whether a rule is broken somewhere."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)
