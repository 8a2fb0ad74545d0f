"""Owns attacks that are tests of the suite already: it runs them and counts, so that the page has them too.

It must not know what they do.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from attacks.record import Row

__all__ = ["FAULTS", "Tests", "run_tests"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tests:
    """Tests that are one class of attack.

    Attributes:
        attack: what they do.
        paths: files, or tests of them, from the root of the repository.
    """

    attack: str
    paths: tuple[str, ...]

    __test__ = False  # its name is not one of a class of tests


_FAULTS = "tests/prep/test_faults.py"
FAULTS = {
    "reads": Tests(
        "preparation: EIO, ESTALE, short reads and truncation at points of the read",
        tuple(
            f"{_FAULTS}::test_{name}"
            for name in ("error_of_the_disk", "file_truncated_during_the_read", "short_reads_are_continued")
        ),
    ),
    "memory": Tests(
        "preparation: memory that runs out at each allocation, copies that fail",
        (f"{_FAULTS}::test_memory_that_runs_out_at_each_allocation", f"{_FAULTS}::test_copy_that_fails"),
    ),
    "interrupts": Tests("preparation: interrupts in each thread", (f"{_FAULTS}::test_interrupts",)),
    "disk": Tests(
        "a full or failing disk while a container, a cache entry or a compiled kernel is written",
        ("tests/format/test_writer.py", "tests/prep/test_cache.py", "tests/prep/test_cache_file.py"),
    ),
    "supply": Tests("code from checkpoints: every source searched for ways to run it", ("tests/test_supply_chain.py",)),
}
"""The classes, by the word on the command line."""


class _Count:
    """A plugin that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: its call, or what kept it from one."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.outcomes["as it should be"] += 1


def run_tests(word: str) -> Row:
    """Run a class and count; a test that is skipped, as those of a GPU where there is none, is not counted.

    Args:
        word: a key of `FAULTS`.
    """
    tests, count, begin = FAULTS[word], _Count(), time.perf_counter()
    paths = [str(ROOT / path) for path in tests.paths]
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *paths], plugins=[count])
    seconds = time.perf_counter() - begin
    return Row.of(tests.attack, 0, count.outcomes, seconds, f"python -m attacks faults {word}", count.failed)
