"""Holds the report of a validation to its schema, and the table of fixes to the codes that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import trellis_format
from trellis_format.report import Finding, Severity
from trellis_format.validate_report import FIXES, Checked, ValidateReport, ValidationFinding, with_fix

SOURCES = Path(trellis_format.__file__).parent
FINDING = Finding(code="broken-linear", severity=Severity.ERROR, message="fact", file="f", numbers={"observed": 1.5})


def report(*findings: ValidationFinding) -> ValidateReport:
    checked = Checked(shards=1, tensors=2, layers=3, data=True, bytes_read=4)
    return ValidateReport(tool_version="1", path="p", container="exl3", checked=checked, findings=findings)


def codes() -> set[str]:
    """Every code that a module passes to a list of findings, from its text."""
    found = {"hidden-size", "intermediate-size"}  # put together from the name of the axis
    for path in SOURCES.glob("*.py"):
        if path.name != "findings.py":
            text = re.sub(r"\s+", " ", path.read_text())
            calls = re.findall(r"(?:findings\.(?:error|warning|note)\(|code = )(?=(.{0,90}))", text)
            words = {word for call in calls for word in re.findall(r'"([a-z0-9-]+)"', call)}
            found |= {word for word in words if "-" in word or word in ("activation", "unreadable")}
    return found


def test_every_code_has_a_fix_and_every_fix_a_code() -> None:
    assert len(codes()) > 30
    assert codes() - set(FIXES) == set()
    assert set(FIXES) - codes() == set()


def test_a_finding_gains_what_to_do() -> None:
    made = with_fix(FINDING)
    assert made.fix == FIXES["broken-linear"]
    assert made.model_dump(exclude={"fix"}) == FINDING.model_dump()


def test_errors_alone_make_it_fail() -> None:
    assert not report().has_errors
    for severity in Severity:
        assert report(with_fix(FINDING.model_copy(update={"severity": severity}))).has_errors == (severity == "error")


def test_json_carries_every_field_and_is_ascii() -> None:
    value = json.loads(report(with_fix(FINDING.model_copy(update={"tensor": "é\x1b"}))).to_json())
    assert (value["schema"], value["schema_version"]) == ("trellis-format/validate", 1)
    assert set(value["findings"][0]) == {"code", "severity", "message", "file", "tensor", "numbers", "fix"}
    assert value["findings"][0]["numbers"] == {"observed": 1.5}
    assert report(with_fix(FINDING.model_copy(update={"tensor": "é"}))).to_json().isascii()


def test_reports_read_back_and_refuse_unknown_keys() -> None:
    made = report(with_fix(FINDING))
    assert ValidateReport.model_validate_json(made.to_json()) == made
    with pytest.raises(ValidationError, match="extra_key"):
        ValidateReport.model_validate({**json.loads(made.to_json()), "extra_key": 1})


def test_the_schema_names_what_a_report_has() -> None:
    schema = ValidateReport.json_schema()
    assert set(schema["properties"]) == set(json.loads(report().to_json()))
