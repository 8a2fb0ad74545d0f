"""Holds the counting of tests to their outcomes, and the classes to tests that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attacks import counted
from attacks.counted import FAULTS, ROOT, Tests


@pytest.mark.parametrize("word", sorted(FAULTS))
def test_the_tests_of_every_class_exist(word: str) -> None:
    for path in FAULTS[word].paths:
        file, _, name = path.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_outcomes_are_counted_and_failures_are_silent_cases(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(5))\n"
        "def test_a(i): assert i != 3\n"
        "@pytest.mark.skip\n"
        "def test_b(): pass\n"
    )
    program = (
        "from attacks import counted\n"
        f"counted.FAULTS['x'] = counted.Tests('an attack', ({str(tmp_path / 'test_x.py')!r},))\n"
        f"counted.ROOT = counted.Path({str(tmp_path)!r})\n"
        "row = counted.run_tests('x')\n"
        "print('ROW', row.outcomes, row.silent, row.command)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "tests"), "PATH": ""},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROW")]
    assert line == ("ROW {'as it should be': 4, 'silent': 1} ['test_x.py::test_a[3]'] python -m attacks faults x"), (
        done.stderr
    )
    assert isinstance(FAULTS["reads"], Tests)
    assert counted.ROOT == ROOT
