"""Holds the report of a soak to its schema, and to naming all that did not hold."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trellis_moe.soak.report import BOUND, LayerReport, SoakReport, soak_schema


def make(**changes: Any) -> SoakReport:
    plain: dict[str, Any] = {
        "device": "cpu", "torch": "2", "asked_seconds": 1.0, "seconds": 1.0,
        "compile_seconds": 0.0, "runs": {"eager": 9}, "tokens": {1: 9},
        "mismatches": 0, "first_mismatches": (), "kernels_before": 3, "kernels_after": 3, "allocated_before": 10,
        "allocated_after": 10, "reserved_before": 20, "reserved_after": 20, "scratch_nbytes": 5,
        "layers": (LayerReport(weights="mul1", launches={8: 9}, errors={8: 1e-3}),),
    }  # fmt: skip
    return SoakReport(**plain | changes)


def test_nothing_fails_where_everything_held() -> None:
    assert make().failures() == ()
    assert make(allocated_after=9, reserved_after=22).failures() == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"asked_seconds": 2.5}, "it was ended after 1.0 of 2.5 seconds"),
        ({"mismatches": 2}, "2 of 9 runs gave other bits"),
        ({"kernels_after": 4}, "1 kernels were compiled after the freeze"),
        ({"allocated_after": 11}, "allocated bytes grew from 10 to 11"),
        ({"layers": (LayerReport(weights="", launches={}, errors={8: 0.1}),)}, f"0.1}}, at most {BOUND}"),
        ({"layers": (LayerReport(weights="", launches={}, errors={8: float("nan")}),)}, "off float64 by {8: nan}"),
    ],
)
def test_what_did_not_hold_is_told_with_both_numbers(changes: dict[str, Any], words: str) -> None:
    (failure,) = make(**changes).failures()
    assert words in failure


def test_a_report_comes_back_from_its_text() -> None:
    report = make(mismatches=1, first_mismatches=((0, 8, "graph"),))
    assert SoakReport.model_validate_json(report.model_dump_json(by_alias=True)) == report


def test_other_keys_and_versions_are_refused() -> None:
    for changes in ({"surplus": 1}, {"schema_version": 1}):
        with pytest.raises(ValidationError):
            make(**changes)
    assert soak_schema()["additionalProperties"] is False
