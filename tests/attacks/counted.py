"""Owns attacks that are tests of the suite already: it runs them and counts, so that the page has them too.

It must not know what they do.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from attacks.record import Row

__all__ = ["FAULTS", "Tests", "run_tests"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tests:
    """Tests that are one class of attack.

    Attributes:
        attack: what they do.
        paths: files, or tests of them, from the root of the repository.
        plugin: one of pytest's that they run under, or none.
    """

    attack: str
    paths: tuple[str, ...]
    plugin: str = ""

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
    "launches": Tests(
        "memory that runs out at each allocation of preparing, binding and running a layer, and while kernels load",
        ("tests/integration/test_launch_memory.py",),
    ),
    "misuse": Tests(
        "misuse: threads, streams, shared and freed memory, tensors of another place, shape, dtype or alignment",
        ("tests/integration/test_misuse.py", "tests/moe/test_arena_guard.py", "tests/moe/test_run_checks.py"),
    ),
    "numbers": Tests(
        "extreme numbers against float64: float16's ends, rows of zeros, one huge channel, scales of 2^-14 to 2^14",
        ("tests/integration/test_numeric_stress.py",),
    ),
    "banks": Tests(
        "banks of 10,000 experts, and on a GPU of more than 8 GiB, against float64",
        ("tests/integration/test_large_banks.py",),
    ),
    "poison": Tests(
        "all memory that torch hands out holds NaN bits first",
        (
            "tests/integration/test_poison.py",
            "tests/kernels/test_linear.py",
            "tests/moe/paths",
            "tests/moe/test_binding.py",
            "tests/moe/test_module.py",
            "tests/moe/test_graphs.py",
        ),
        plugin="poison",
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


def run_tests(word: str, *, gpu: bool = False, jobs: int = 1) -> Row:
    """Run a class and count; a test that is skipped is not counted.

    Args:
        word: a key of `FAULTS`.
        gpu: whether to run the tests that need a GPU, instead of all others.
        jobs: processes, more than one with pytest-xdist.
    """
    tests, count, begin = FAULTS[word], _Count(), time.perf_counter()
    options = ["-m", "gpu" if gpu else "not gpu", *(["-n", str(jobs)] if jobs > 1 else [])]
    paths = [str(ROOT / path) for path in tests.paths]
    plugins = os.environ.get("PYTEST_PLUGINS")
    if tests.plugin:
        os.environ["PYTEST_PLUGINS"] = tests.plugin  # which processes of pytest-xdist see too
    try:
        pytest.main(
            ["-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *options, *paths], plugins=[count]
        )
    finally:
        os.environ.pop("PYTEST_PLUGINS", None)
        if plugins is not None:
            os.environ["PYTEST_PLUGINS"] = plugins
    seconds, command = time.perf_counter() - begin, f"python -m attacks faults {word}"
    if not gpu:
        return Row.of(tests.attack, 0, count.outcomes, seconds, command, count.failed)
    row = Row.of(f"{tests.attack}; on a GPU", 0, count.outcomes, seconds, f"{command} --gpu", count.failed)
    return replace(row, machine=f"{torch.cuda.get_device_name()}, Python {platform.python_version()}")
