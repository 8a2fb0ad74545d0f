"""Owns the checked table of what kernels cost: written once, compared with every later compilation.

It must not know how a kernel is compiled.  A table is a JSON object from a kernel's name to its registers, stack bytes
and shared bytes, sorted by name, so that a change reads as a difference of lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from trellis_kernels.cute.report import KernelReport
from trellis_kernels.errors import KernelValueError

__all__ = ["compare_table", "write_table"]

_COLUMNS = ("registers", "stack_bytes", "shared_bytes")

_Costs = dict[str, dict[str, int]]


def write_table(path: Path, reports: Iterable[KernelReport]) -> None:
    """Write the costs of kernels, replacing what the file had.

    Args:
        path: the table's file.
        reports: kernels that compiled.
    """
    lines = [f"{json.dumps(name)}: {json.dumps(costs)}" for name, costs in sorted(_costs(reports).items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare_table(path: Path, reports: Iterable[KernelReport]) -> list[str]:
    """Compare the costs of kernels with a table.

    Args:
        path: the table's file.
        reports: kernels that compiled; a table may have more.

    Returns:
        One line for each kernel that is not in the table, or takes another amount of a column than the table has.

    Raises:
        KernelValueError: if the file is not such a table.
    """
    table = _read(path)
    problems = []
    for name, costs in sorted(_costs(reports).items()):
        if name not in table:
            problems.append(f"{name}: not in {path}")
            continue
        changed = [
            f"{column} {table[name].get(column)} -> {costs[column]}"
            for column in _COLUMNS
            if table[name].get(column) != costs[column]
        ]
        if changed:
            problems.append(f"{name}: {', '.join(changed)}")
    return problems


def _costs(reports: Iterable[KernelReport]) -> _Costs:
    return {str(report.key): {column: getattr(report, column) for column in _COLUMNS} for report in reports}


def _read(path: Path) -> _Costs:
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KernelValueError(f"{path} is not a table of kernel costs: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(costs, dict) for costs in table.values()):
        raise KernelValueError(f"{path} is not a table of kernel costs: it must be an object of objects")
    return table
