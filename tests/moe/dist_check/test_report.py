"""Holds the report to its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from trellis_moe.dist_check.report import SCHEMA, Agreement, MemoryUse, Report

AGREEMENT = Agreement(way="ep", rank=0, tokens=8, mode="graph", error=0.0, equal=True, ok=True)
MEMORY = MemoryUse(layer="a", rank=1, planned_bytes=10, allocated_bytes=12, peak_bytes=12, ok=True)


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {"world_size": 2, "device": "cpu", "backend": "gloo", "ok": True}
    fields |= {"agreements": (AGREEMENT,), "memory": (MEMORY,)}
    return Report(**(fields | changes))


def test_a_report_goes_through_a_file() -> None:
    text = report().model_dump_json()
    assert Report.model_validate_json(text) == report()
    assert (json.loads(text)["schema_name"], json.loads(text)["schema_version"]) == (SCHEMA, 1)


@pytest.mark.parametrize("changes", [{"world_size": -1}, {"more": 1}, {"schema_version": 2}, {"ok": None}])
def test_what_is_no_report_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        report(**changes)
