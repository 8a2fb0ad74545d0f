"""Owns the collection of findings, bounded per code so that one broken rule cannot flood a report.

It must not know what is inspected.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

from trellis_format.errors import FormatError, bounded
from trellis_format.report import Finding, Severity

__all__ = ["MAX_FINDINGS_PER_CODE", "Findings"]

MAX_FINDINGS_PER_CODE = 20
"""Most findings of one code that are listed; one more counts the rest."""


class Findings:
    """Findings as they come up.  `file` of a finding defaults to none, `tensor` too."""

    def __init__(self) -> None:
        self._listed: list[Finding] = []
        self._counts: Counter[tuple[str, Severity]] = Counter()

    def error(self, code: str, error: FormatError) -> None:
        """Add what an error says."""
        self._add(code, Severity.ERROR, error.message, error.file, error.tensor, error.numbers)

    def warning(
        self,
        code: str,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        numbers: Mapping[str, int | float] | None = None,
    ) -> None:
        """Add a disagreement that the tensors decide."""
        self._add(code, Severity.WARNING, message, file, tensor, numbers)

    def note(
        self, code: str, message: str, *, file: str | os.PathLike[str] | None = None, tensor: str | None = None
    ) -> None:
        """Add something worth knowing."""
        self._add(code, Severity.NOTE, message, file, tensor, None)

    def collected(self) -> tuple[Finding, ...]:
        """All findings, errors first, in the order in which they came up."""
        rest = [
            Finding(code=code, severity=severity, message=f"{count - MAX_FINDINGS_PER_CODE} more of this code")
            for (code, severity), count in self._counts.items()
            if count > MAX_FINDINGS_PER_CODE
        ]
        order = list(Severity)
        return tuple(sorted([*self._listed, *rest], key=lambda finding: order.index(finding.severity)))

    def _add(
        self,
        code: str,
        severity: Severity,
        message: str,
        file: str | os.PathLike[str] | None,
        tensor: str | None,
        numbers: Mapping[str, int | float] | None,
    ) -> None:
        self._counts[code, severity] += 1
        if self._counts[code, severity] <= MAX_FINDINGS_PER_CODE:
            where = None if file is None else os.fspath(file)
            self._listed.append(
                Finding(
                    code=code,
                    severity=severity,
                    message=bounded(message),
                    file=where,
                    tensor=None if tensor is None else bounded(tensor),
                    numbers=dict(numbers or {}),
                )
            )
