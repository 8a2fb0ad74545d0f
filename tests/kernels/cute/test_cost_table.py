"""Holds the table of kernel costs to showing every change, and the one in docs to what the compiler gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trellis_kernels.cute.cost_table import compare_table, write_table
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.cute.registry import registered_keys
from trellis_kernels.cute.report import KernelReport, report_kernel
from trellis_kernels.errors import KernelValueError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "kernel_costs_sm_90a.json"
REPORTS = [
    KernelReport(DecodeKey("sm_90a", name, 6, "float16"), 0.1, registers=40 + index, shared_bytes=9216)
    for index, name in enumerate(("mul1", "3inst", "mcg"))
]


def test_what_was_written_compares_equal_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_table(path, REPORTS)
    assert compare_table(path, reversed(REPORTS)) == []
    assert compare_table(path, REPORTS[:1]) == []
    lines = path.read_text().splitlines()
    assert lines[1:-1] == sorted(lines[1:-1], key=lambda line: line.split(":")[0])
    assert len(lines) == len(REPORTS) + 2


@pytest.mark.parametrize("column", ["registers", "stack_bytes", "shared_bytes"])
@pytest.mark.parametrize("step", [1, -1])
def test_every_change_of_a_cost_shows_both_numbers(tmp_path: Path, column: str, step: int) -> None:
    path = tmp_path / "costs.json"
    write_table(path, REPORTS)
    before = getattr(REPORTS[1], column)
    changed = dataclasses.replace(REPORTS[1], **{column: before + step})
    assert compare_table(path, [changed]) == [f"{changed.key}: {column} {before} -> {before + step}"]


def test_a_kernel_that_is_not_in_the_table_shows(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_table(path, REPORTS[1:])
    assert compare_table(path, REPORTS) == [f"{REPORTS[0].key}: not in {path}"]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(KernelValueError, match="not a table of kernel costs"):
        compare_table(path, REPORTS)
    with pytest.raises(KernelValueError, match="not a table of kernel costs"):
        compare_table(tmp_path / "absent.json", REPORTS)


def test_the_table_in_docs_has_every_registered_kernel_without_a_stack() -> None:
    table = json.loads(DOCS.read_text())
    assert set(table) == {str(key) for key in registered_keys("sm_90a")}
    assert all(costs["stack_bytes"] == 0 for costs in table.values())


def test_the_table_in_docs_is_what_the_compiler_gives() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    keys = registered_keys("sm_90a")[::40]  # a sample; `trellis-kernels compile --table` compares all
    assert compare_table(DOCS, map(report_kernel, keys)) == []
