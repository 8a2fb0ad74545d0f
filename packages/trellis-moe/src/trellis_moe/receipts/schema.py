"""Owns the shape of a receipt: all that a measured number needs before it may be shown.  It must not measure.

A receipt is one run of a benchmark.  It says on what machine and from what commit, holds the raw samples of each row
and the ceilings of the same run, and every row was checked against a reference.  A row that lacks any of it, or whose
numbers do not agree with each other, is refused.  The schema is versioned: a field that is removed or changes its
meaning raises `schema_version`.
"""

from __future__ import annotations

import math
import statistics
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Case",
    "Ceiling",
    "Check",
    "DeviceState",
    "LayerCase",
    "Machine",
    "Memory",
    "OpCase",
    "ParallelCase",
    "PrepareCase",
    "Ratio",
    "Receipt",
    "Row",
    "Skipped",
    "Unit",
    "Versions",
]

SCHEMA: Final = "trellis-moe/receipt"
"""Name of the schema."""
SCHEMA_VERSION: Final = 1
"""Version of the schema."""

_LEAST_SAMPLES, _MOST_SAMPLES = 5, 64
_TOLERANCE = 1e-5  # relative, of a ratio to what the numbers beside it give

Unit = Literal["bytes", "flops", "weights"]
"""What a row or a ceiling counts: bytes moved, floating-point operations, or weights decoded."""
Samples = Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=_LEAST_SAMPLES, max_length=_MOST_SAMPLES)]
"""Raw times, nanoseconds."""
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Versions(_Part):
    """What computed.

    Attributes:
        python: version of Python.
        torch: version of torch.
        cuda: CUDA that torch was built with; None without.
        dsl: version of nvidia-cutlass-dsl; None where it is not installed.
        trellis: version of the four packages.
    """

    python: Name
    torch: Name
    cuda: Name | None = None
    dsl: Name | None = None
    trellis: Name


class DeviceState(_Part):
    """A GPU at one moment.

    Attributes:
        sm_clock_mhz: clock of its multiprocessors, MHz.
        memory_clock_mhz: clock of its memory, MHz.
        power_watts: power drawn, watts.
        temperature_celsius: temperature, degrees Celsius.
    """

    sm_clock_mhz: Count
    memory_clock_mhz: Count
    power_watts: Annotated[float, Field(ge=0)]
    temperature_celsius: int


class Machine(_Part):
    """Where it ran.

    Attributes:
        kind: `cuda`, or `cpu` for a rehearsal, which no table shows.
        name: of the GPU, or of the processor.
        count: GPUs that took part, or 1.
        driver: version of the GPU's driver; None on a CPU.
        multiprocessors: of one GPU, or 0.
        start: each GPU before the first measurement.
        end: each GPU after the last one.
    """

    kind: Literal["cuda", "cpu"]
    name: Name
    count: Annotated[int, Field(ge=1)]
    driver: Name | None = None
    multiprocessors: Count
    start: tuple[DeviceState, ...]
    end: tuple[DeviceState, ...]

    @model_validator(mode="after")
    def _check_states(self) -> Machine:
        wanted = self.count if self.kind == "cuda" else 0
        if len(self.start) != wanted or len(self.end) != wanted:
            raise ValueError(
                f"{self.count} {self.kind} devices need {wanted} states at start and end, got {len(self.start)} and "
                f"{len(self.end)}"
            )
        if (self.driver is None) != (self.kind == "cpu"):
            raise ValueError(
                f"a driver version belongs to a GPU and to nothing else, got {self.driver!r} on {self.kind}"
            )
        return self


class Ceiling(_Part):
    """The most that the machine did of one thing, in the same run.

    Attributes:
        name: what, for example `device copy`.
        unit: what `work` counts.
        work: of one sample.
        samples_ns: times.
    """

    name: Name
    unit: Unit
    work: Annotated[int, Field(gt=0)]
    samples_ns: Samples

    @property
    def rate(self) -> float:
        """Units a second, by the median."""
        return self.work / statistics.median(self.samples_ns) * 1e9


class Check(_Part):
    """A comparison of what was timed with a reference.

    Attributes:
        reference: what it was compared with.
        error: relative L2, or the share of wrong elements where outputs are exact.
        bound: most that it may be.
    """

    reference: Name
    error: Annotated[float, Field(ge=0)]
    bound: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _check_bound(self) -> Check:
        if self.error > self.bound:
            raise ValueError(f"error {self.error:g} is above its bound {self.bound:g}; such a row is no measurement")
        return self


class Ratio(_Part):
    """A row's rate over that of a ceiling, in the ceiling's unit.

    Attributes:
        of: name of the ceiling.
        value: the row's rate over the ceiling's.
        better: which direction is better.
    """

    of: Name
    value: Annotated[float, Field(gt=0)]
    better: Literal["higher", "lower"] = "higher"


class Memory(_Part):
    """Bytes that a row took.

    Attributes:
        planned_bytes: what the plan said: scratch of a layer, or final weights of a preparation.
        final_bytes: what was there in the end.
        bound_bytes: staging bound of a preparation, or 0.
        peak_host_bytes: most on the host beyond the final weights; None where the system does not tell.
        peak_device_bytes: the same on the device; None on a CPU.
    """

    planned_bytes: Count
    final_bytes: Count
    bound_bytes: Count = 0
    peak_host_bytes: Count | None = None
    peak_device_bytes: Count | None = None


class LayerCase(_Part):
    """A whole layer of routed experts.

    Attributes:
        kind: `layer`.
        geometry: name of the preset.
        experts, hidden, intermediate, top_k: sizes; channels of this rank's share.
        codebook: of the codes.
        k: rate.
        tokens: of one launch.
        io_dtype: of x and y.
        contender: what ran, `trellis` for this project.
        arithmetic: of the products, as the plan names it; `none` for another contender.
        path: which kernels, as the plan names them.
        mode: `graph`, a replay of a CUDA graph, or `eager`, launched from Python.
    """

    kind: Literal["layer"] = "layer"
    geometry: Name
    experts: Count
    hidden: Count
    intermediate: Count
    top_k: Count
    codebook: Name
    k: Name
    tokens: Annotated[int, Field(gt=0)]
    io_dtype: Name
    contender: Name
    arithmetic: Name
    path: Name
    mode: Literal["graph", "eager"]


class OpCase(_Part):
    """One op.

    Attributes:
        kind: `op`.
        op: its name.
        case: on what.
        mode: as in `LayerCase`.
    """

    kind: Literal["op"] = "op"
    op: Name
    case: Name
    mode: Literal["graph", "eager"]


class PrepareCase(_Part):
    """The way of weights to a device.

    Attributes:
        kind: `prepare`.
        layer: what was prepared.
        layers: preparations that were held at a time while memory was measured; a sample is of one.
        bound_bytes: of staging, or 0.
        code_bytes: of one layer, without its tables.
    """

    kind: Literal["prepare"] = "prepare"
    layer: Name
    layers: Annotated[int, Field(gt=0)]
    bound_bytes: Count
    code_bytes: Count


class ParallelCase(_Part):
    """A layer that ranks share.

    Attributes:
        kind: `parallel`.
        geometry: name of the preset.
        codebook: of the codes.
        k: rate.
        tokens: of one launch.
        scheme: `tp`, `ep` or `grid`.
        ranks: how many.
        reduce: how partial sums are added up.
        mode: as in `LayerCase`.
    """

    kind: Literal["parallel"] = "parallel"
    geometry: Name
    codebook: Name
    k: Name
    tokens: Annotated[int, Field(gt=0)]
    scheme: Literal["tp", "ep", "grid"]
    ranks: Annotated[int, Field(gt=0)]
    reduce: Name
    mode: Literal["graph", "eager"]


Case = Annotated[LayerCase | OpCase | PrepareCase | ParallelCase, Field(discriminator="kind")]
"""What a row measured."""


class Row(_Part):
    """One measurement.

    Attributes:
        case: what was measured.
        samples_ns: times of one launch, or of one preparation.
        bytes: that it must read and write at the least.
        flops: floating-point operations of its products, two for each weight and row.
        weights: that it decodes at the least.
        check: of what was timed.
        ratios: its rates over ceilings of the same run.
        memory: where memory is part of the measurement.
    """

    case: Case
    samples_ns: Samples
    bytes: Count
    flops: Count
    weights: Count
    check: Check
    ratios: Annotated[tuple[Ratio, ...], Field(min_length=1)]
    memory: Memory | None = None

    @property
    def median_ns(self) -> float:
        """Median time, nanoseconds."""
        return statistics.median(self.samples_ns)

    def rate(self, unit: Unit) -> float:
        """Bytes, operations or weights a second, by the median."""
        return int(getattr(self, unit)) / self.median_ns * 1e9

    @model_validator(mode="after")
    def _check_memory(self) -> Row:
        if isinstance(self.case, PrepareCase) and self.memory is None:
            raise ValueError("a row of a preparation needs its memory")
        return self


class Skipped(_Part):
    """What a run left out.

    Attributes:
        what: the case.
        why: in words.
    """

    what: Name
    why: Name


class Receipt(_Part):
    """One run of a benchmark.

    Attributes:
        schema_name: `trellis-moe/receipt`; `schema` in JSON.
        schema_version: of this shape.
        command: that was run, without paths of the user.
        commit: of the sources, in hexadecimal.
        dirty: whether the sources differed from the commit.
        created: when it began, UTC, as `2026-01-31T12:00:00Z`.
        machine: where.
        versions: of what computed.
        ceilings: of this run.
        rows: measurements.
        skipped: what was left out.
    """

    schema_name: Literal["trellis-moe/receipt"] = Field(default=SCHEMA, alias="schema")
    schema_version: Literal[1] = SCHEMA_VERSION
    command: Name
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
    dirty: bool
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    machine: Machine
    versions: Versions
    ceilings: Annotated[tuple[Ceiling, ...], Field(min_length=1)]
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    skipped: tuple[Skipped, ...] = ()

    def ceiling(self, name: str) -> Ceiling:
        """The ceiling of that name.

        Raises:
            KeyError: if this run has none.
        """
        return {ceiling.name: ceiling for ceiling in self.ceilings}[name]

    @model_validator(mode="after")
    def _check_ratios(self) -> Receipt:
        ceilings = {ceiling.name: ceiling for ceiling in self.ceilings}
        if len(ceilings) != len(self.ceilings):
            raise ValueError("two ceilings have the same name")
        for row in self.rows:
            for ratio in row.ratios:
                found = ceilings.get(ratio.of)
                if found is None:
                    raise ValueError(f"a ratio is of {ratio.of!r}, which this run has not measured")
                value = row.rate(found.unit) / found.rate
                if not math.isclose(value, ratio.value, rel_tol=_TOLERANCE):
                    raise ValueError(f"the ratio to {ratio.of!r} is {ratio.value:g}, its row says {value:g}")
        return self

    @model_validator(mode="after")
    def _check_versions(self) -> Receipt:
        if self.machine.kind == "cuda" and (self.versions.cuda is None or self.versions.dsl is None):
            raise ValueError("a run on a GPU needs the versions of CUDA and of nvidia-cutlass-dsl")
        return self

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a receipt's file."""
        return cls.model_json_schema(by_alias=True, mode="serialization")
