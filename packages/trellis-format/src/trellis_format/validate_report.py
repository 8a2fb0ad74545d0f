"""Owns the shape of a validation report, and what to do about each finding.  It must not know how one is found.

The schema is versioned: a field that is removed or changes its meaning raises `schema_version`.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from trellis_format.report import Finding, Report, Severity

__all__ = ["FIXES", "SCHEMA", "SCHEMA_VERSION", "Checked", "ValidateReport", "ValidationFinding", "with_fix"]

SCHEMA: Final = "trellis-format/validate"
"""Name of the schema."""
SCHEMA_VERSION: Final = 1
"""Version of the schema."""

_FETCH = "fetch the file again and compare its size and checksum with the publisher's"
_CONVERT = "convert the model again, or fetch the file again"

FIXES: dict[str, str] = {
    "activation": "state hidden_act in config.json, or name the activation where the layer is run",
    "bias-not-finite": _CONVERT,
    "broken-checkpoint": "remove the file that repeats the tensor, or take both files from one conversion",
    "broken-layer": "fetch the shards that lack, or convert the layer again",
    "broken-linear": _CONVERT,
    "broken-shard": _FETCH,
    "config-invalid": "correct the key in the named file",
    "config-missing": "put the model's config.json beside the shards",
    "container-invalid": _FETCH,
    "expert-count": "take config.json and shards from one conversion",
    "head-bits": "correct head_bits; readers take K from the tensors",
    "hidden-size": "take config.json and shards from one conversion",
    "index-ignored": "validate without --ignore-index to compare the index with the shards",
    "index-mismatch": "fetch the index and the shards from one conversion, or rebuild the index from the shards",
    "intermediate-size": "take config.json and shards from one conversion",
    "json-invalid": "correct the file or fetch it again",
    "legacy-scale": "none is needed",
    "marker-value": "convert the model again with the codebook's own multiplier",
    "method-ignored": "correct quant_method; the tensors decide what a file is",
    "method-conflict": "correct quant_method; the tensors decide what a file is",
    "mixed-codebooks": "convert the layer again with one codebook",
    "not-described": "none is needed; what reads this container handles the layer itself",
    "no-experts": "give the names of the experts with --pattern, if the model has any",
    "orphan-tensor": "fetch the shard with the module's trellis, or leave the tensor: it is not read",
    "padding-not-zero": "convert the layer again; channels past the true size must have a scale and a bias of zero",
    "payload-hash": _FETCH,
    "rank-sliced": "convert the model again to whole linears; slices of this dialect cannot be joined",
    "scale-not-finite": _CONVERT,
    "shard-not-read": "none is needed, or list the file in the index",
    "stated-otherwise": "take the configuration and the shards from one conversion",
    "storage-absent": "fetch the shard that holds it, or correct quantization_config.json",
    "storage-invalid": "correct quantization_config.json",
    "storage-missing": "none is needed",
    "storage-shape": "take quantization_config.json and the shards from one conversion",
    "storage-silent": "none is needed",
    "unquantised-expert": "none is needed, or convert the expert as well",
    "unreadable": "check the disk and whether the file was changed while it was read",
    "up-divisor": "none is needed",
}
"""What to do about a finding, by its code."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ValidationFinding(_Part):
    """One thing that was noticed.

    Attributes:
        code: what kind of thing, stable between versions.
        severity: what it means for a reader.
        message: the fact, both values and the rule.
        file: path of the file, or None.
        tensor: name of the tensor or module, or None.
        numbers: the numbers of the message by what they are, such as `observed` and `expected`; empty without any.
        fix: what to do about it.
    """

    code: str
    severity: Severity
    message: str
    file: str | None
    tensor: str | None
    numbers: dict[str, int | float]
    fix: str


class Checked(_Part):
    """What was looked at.

    Attributes:
        shards: safetensors files.
        tensors: tensors whose headers were checked.
        layers: layers of routed experts.
        data: whether tensor data was read.
        bytes_read: bytes of tensor data that were read.
    """

    shards: int
    tensors: int
    layers: int
    data: bool
    bytes_read: int


class ValidateReport(Report):
    """The outcome of a validation."""

    schema_name: Literal["trellis-format/validate"] = Field(default=SCHEMA, alias="schema")
    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: str
    path: str
    container: str
    checked: Checked
    findings: tuple[ValidationFinding, ...]

    @property
    def has_errors(self) -> bool:
        """Whether a rule is broken somewhere."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def with_fix(finding: Finding) -> ValidationFinding:
    """A finding with what to do about it."""
    return ValidationFinding(**finding.model_dump(), fix=FIXES[finding.code])
