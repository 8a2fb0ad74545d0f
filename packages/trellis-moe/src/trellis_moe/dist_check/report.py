"""Owns the report of a check: its shape and version.  It must not compute."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SCHEMA", "Agreement", "MemoryUse", "Report"]

SCHEMA: Final = "trellis-moe/dist-check"
"""Name of the schema; its version is a field of `Report`."""

_Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Agreement(_Part):
    """One result compared with that of one rank.

    Attributes:
        way: how the layer was shared out and its results became one.
        rank: whose result.
        tokens: of the run.
        mode: `eager`, or `graph` for a replay, which also has to repeat the eager bits.
        error: relative L2.
        equal: whether no bit differs.
        ok: whether it is as it has to be.
    """

    way: str
    rank: _Count
    tokens: _Count
    mode: Literal["eager", "graph"]
    error: float
    equal: bool
    ok: bool


class MemoryUse(_Part):
    """Device memory of one rank for one layer.

    Attributes:
        layer: which.
        rank: whose.
        planned_bytes: prepared tensors, scratch and what a binding holds, as the plan says.
        allocated_bytes: that tensors asked for, after binding, beyond what was there before.
        peak_bytes: most that there was, until the first run ended.
        ok: whether the peak is the plan's, but for up to 64 KiB in which ranks compare what they declared.
    """

    layer: str
    rank: _Count
    planned_bytes: _Count
    allocated_bytes: _Count
    peak_bytes: _Count
    ok: bool


class Report(_Part):
    """A whole check.

    Attributes:
        schema_name: `trellis-moe/dist-check`.
        schema_version: of this shape.
        world_size: ranks.
        device: that each rank had.
        backend: of the collectives.
        agreements: of all ranks.
        memory: of all ranks; empty where nothing was timed.
        ok: whether everything is as it has to be.
    """

    schema_name: Literal["trellis-moe/dist-check"] = SCHEMA
    schema_version: Literal[1] = 1
    world_size: _Count
    device: str
    backend: str
    agreements: tuple[Agreement, ...]
    memory: tuple[MemoryUse, ...] = ()
    ok: bool
