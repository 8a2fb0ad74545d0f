"""Owns what a JUnit report of tests says: counts, what failed, and the (codebook, K) that names of tests tell.

It must not know topics or outcomes.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trellis_format.codebooks import CODEBOOKS
from trellis_moe.errors import MoeValueError

__all__ = ["ReportCounts", "read_junit"]

Pair = tuple[str, str]

_PAIR = re.compile(rf"(?<![\w.])({'|'.join(sorted(CODEBOOKS, key=len, reverse=True))})-(\d(?:\.5)?)(?![\w.])")


@dataclass(frozen=True)
class ReportCounts:
    """What some tests gave.

    Attributes:
        passed: how many.
        failed: names of those that failed or broke off.
        skipped: how many, with those that were expected to fail.
        covers: (codebook, K) that names of tests which ran tell, in the order of the codebooks.
        failing: those of them of which a test failed.
    """

    passed: int
    failed: tuple[str, ...]
    skipped: int
    covers: tuple[Pair, ...]
    failing: tuple[Pair, ...]


def read_junit(paths: Iterable[Path], only: str = "") -> ReportCounts:
    """Read reports, as `pytest --junitxml` writes them.

    Args:
        paths: their files.
        only: a regular expression that a test's `class::name` must contain.

    Raises:
        MoeValueError: if a file cannot be read or is no such report, or no test of them is meant.
    """
    passed, skipped, failed = 0, 0, list[str]()
    covers, failing = set[Pair](), set[Pair]()
    for name, outcome in _tests(paths, only):
        pairs = {(book, rate) for book, rate in _PAIR.findall(name) if (book, rate) in _legal()}
        passed += outcome == "passed"
        skipped += outcome == "skipped"
        covers |= set() if outcome == "skipped" else pairs
        if outcome == "failed":
            failed.append(name.rpartition("::")[2])
            failing |= pairs
    if not passed + skipped + len(failed):
        raise MoeValueError(f"no test of {', '.join(map(str, paths))} has a name that contains {only!r}")
    order = _legal()
    return ReportCounts(
        passed,
        tuple(failed),
        skipped,
        tuple(pair for pair in order if pair in covers),
        tuple(pair for pair in order if pair in failing),
    )


def _tests(paths: Iterable[Path], only: str) -> Iterable[tuple[str, str]]:
    """(class::name, `passed`, `failed` or `skipped`) of each test; one that broke off in its teardown failed."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            root = ET.parse(path).getroot()
        except (OSError, ET.ParseError) as error:
            raise MoeValueError(f"{path}: is no report of tests: {error}") from error
        for case in root.iter("testcase"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            kinds = {part.tag for part in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            if re.search(only, name) and found.get(name) != "failed":
                found[name] = outcome
    return found.items()


def _legal() -> tuple[Pair, ...]:
    return tuple((name, str(rate)) for name, book in CODEBOOKS.items() for rate in book.legal_rates)
