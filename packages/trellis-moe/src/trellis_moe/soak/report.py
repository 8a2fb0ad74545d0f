"""Owns the report of a soak: its schema, and what must hold.  It must not run anything."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BOUND", "LayerReport", "SoakReport", "soak_schema"]

BOUND = 4e-3
"""Relative L2 distance to float64 that layers with bfloat16 inputs stay within."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerReport(_Model):
    """One layer.

    Attributes:
        weights: codebook, rates and law.
        launches: launches by variant, replays left out.
        errors: relative L2 distance to float64 by variant.
    """

    weights: str
    launches: dict[int, int]
    errors: dict[int, float]


class SoakReport(_Model):
    """What a soak did, and whether it held.

    Attributes:
        schema_name: of this document.
        schema_version: bumped with any change of meaning.
        device: its name.
        torch: version.
        asked_seconds: that the load was to take.
        seconds: that it took.
        compile_seconds: before it.
        runs: by kind.
        tokens: runs by tokens, in powers of two.
        mismatches: runs whose bits were others than the first run's.
        first_mismatches: (layer, tokens, kind) of the first hundred.
        kernels_before: kernels of the process when it was frozen.
        kernels_after: at the end.
        allocated_before: bytes that torch had allocated after the first rounds.
        allocated_after: at the end.
        reserved_before: bytes that torch held, likewise; no failure where they grow, for the order in which the load
            frees its own inputs and outputs decides whether the allocator needs another segment of 2 MiB.
        reserved_after: at the end.
        scratch_nbytes: of the arena that all layers share.
        layers: each of them.
    """

    schema_name: Literal["trellis-moe/soak"] = Field(default="trellis-moe/soak", alias="schema")
    schema_version: Literal[2] = 2
    device: str
    torch: str
    asked_seconds: float
    seconds: float
    compile_seconds: float
    runs: dict[str, int]
    tokens: dict[int, int]
    mismatches: int
    first_mismatches: tuple[tuple[int, int, str], ...]
    kernels_before: int
    kernels_after: int
    allocated_before: int
    allocated_after: int
    reserved_before: int
    reserved_after: int
    scratch_nbytes: int
    layers: tuple[LayerReport, ...]

    def failures(self) -> tuple[str, ...]:
        """What did not hold, in words with both numbers."""
        found = []
        if self.seconds < self.asked_seconds:
            found.append(f"it was ended after {self.seconds:.1f} of {self.asked_seconds:.1f} seconds")
        if self.mismatches:
            found.append(f"{self.mismatches} of {sum(self.runs.values())} runs gave other bits than the first one")
        if self.kernels_after != self.kernels_before:
            found.append(f"{self.kernels_after - self.kernels_before} kernels were compiled after the freeze")
        if self.allocated_after > self.allocated_before:
            found.append(f"allocated bytes grew from {self.allocated_before} to {self.allocated_after}")
        for index, layer in enumerate(self.layers):
            far = {tokens: error for tokens, error in layer.errors.items() if not error <= BOUND}
            if far:
                found.append(f"layer {index} is off float64 by {far}, at most {BOUND} is allowed")
        return tuple(found)


def soak_schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    return SoakReport.model_json_schema(by_alias=True, mode="serialization")
