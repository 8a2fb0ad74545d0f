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
        found = ROOT / file
        assert f"def {name}" in "".join(
            path.read_text() for path in (found.rglob("*.py") if found.is_dir() else [found])
        )
    if FAULTS[word].plugin:
        assert (ROOT / f"tests/{FAULTS[word].plugin}.py").is_file()


def test_outcomes_are_counted_and_failures_are_silent_cases(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import os\n"
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(5))\n"
        "def test_a(i): assert i != 3\n"
        "@pytest.mark.skip\n"
        "def test_b(): pass\n"
        "@pytest.mark.gpu\n"
        "def test_c(): pass\n"
        "def test_d(): assert os.environ['PYTEST_PLUGINS'] == 'poison'\n"
    )
    program = (
        "from attacks import counted\n"
        f"counted.FAULTS['x'] = counted.Tests('an attack', ({str(tmp_path / 'test_x.py')!r},), 'poison')\n"
        f"counted.ROOT = counted.Path({str(tmp_path)!r})\n"
        "row = counted.run_tests('x')\n"
        "print('ROW', row.outcomes, row.silent, row.command)\n"
        "counted.torch.cuda.get_device_name = lambda: 'a GPU'\n"
        "row = counted.run_tests('x', gpu=True)\n"
        "print('GPU', row.outcomes, row.attack, row.command, row.machine)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "tests"), "PATH": ""},
    )  # fmt: skip
    (on_gpu,) = [line for line in done.stdout.splitlines() if line.startswith("GPU")]
    assert on_gpu.startswith(
        "GPU {'as it should be': 1} an attack; on a GPU python -m attacks faults x --gpu a GPU, "
    ), done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROW")]
    assert line == ("ROW {'as it should be': 5, 'silent': 1} ['test_x.py::test_a[3]'] python -m attacks faults x"), (
        done.stderr
    )
    assert isinstance(FAULTS["reads"], Tests)
    assert counted.ROOT == ROOT
