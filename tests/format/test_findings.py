"""Holds the collection of findings to its order and its bound."""

from __future__ import annotations

from pathlib import Path

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.findings import MAX_FINDINGS_PER_CODE, Findings
from trellis_format.report import Severity


def test_errors_come_first_and_the_rest_in_order() -> None:
    findings = Findings()
    findings.note("a", "first note")
    findings.warning("b", "a warning", file=Path("x/y"), tensor="t")
    findings.error("c", FormatValueError("an error", file="f", tensor="u"))
    findings.note("d", "second note")
    findings.error("a", FormatTypeError("another error"))
    assert [(found.code, found.severity.value, found.message) for found in findings.collected()] == [
        ("c", "error", "an error"),
        ("a", "error", "another error"),
        ("b", "warning", "a warning"),
        ("a", "note", "first note"),
        ("d", "note", "second note"),
    ]
    error, _, warning, *_ = findings.collected()
    assert (error.file, error.tensor) == ("f", "u")
    assert (warning.file, warning.tensor) == ("x/y", "t")


def test_one_code_cannot_flood_a_report() -> None:
    findings = Findings()
    for number in range(MAX_FINDINGS_PER_CODE + 1000):
        findings.error("many", FormatValueError(f"error {number}"))
        findings.note("many", f"note {number}")
    findings.warning("one", "a warning")
    collected = findings.collected()
    assert len(collected) == 2 * (MAX_FINDINGS_PER_CODE + 1) + 1
    errors = [found for found in collected if found.severity is Severity.ERROR]
    assert errors[0].message == "error 0"
    assert errors[-1].message == "1000 more of this code"
    assert collected[-1].message == "1000 more of this code"
    assert collected[len(errors)].message == "a warning"


def test_the_bound_itself_is_listed_in_full() -> None:
    findings = Findings()
    for number in range(MAX_FINDINGS_PER_CODE):
        findings.warning("some", f"warning {number}")
    assert [found.message for found in findings.collected()] == [f"warning {n}" for n in range(MAX_FINDINGS_PER_CODE)]


def test_nothing_gives_nothing() -> None:
    assert Findings().collected() == ()
