"""Owns the command line of trellis-kernels.  It must not know how a kernel is built.

`python -m trellis_kernels compile --arch sm_90a` compiles every registered kernel of one target, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TextIO

from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.registry import registered_keys
from trellis_kernels.cute.report import KernelReport, compile_reports

__all__ = ["main"]

_COLUMNS = ("registers", "stack_bytes", "shared_bytes", "code_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means those of this process.

    Returns:
        0; or 1 if a kernel failed to compile, spills, or none was selected.  Wrong arguments exit with 2.
    """
    options = _parser().parse_args(argv)
    archs = options.arch or tuple(ARCHS)
    keys = [key for arch in archs for key in registered_keys(arch) if options.match in str(key)]
    if not keys:
        print(f"no registered kernel of {', '.join(archs)} matches {options.match!r}", file=sys.stderr)
        return 1
    reports = _compile(keys, options.jobs, sys.stderr)
    failed = sum(report.error is not None for report in reports)
    spilled = sum(report.stack_bytes > 0 for report in reports)
    if options.json:
        rows = [report.as_row() for report in reports]
        json.dump({"kernels": rows, "failed": failed, "spilled": spilled}, sys.stdout, indent=1)
        print()
    else:
        _print_table(reports)
        print(f"{len(reports)} kernels, {failed} failed, {spilled} spilled")
    return 0 if all(report.is_good for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trellis-kernels", description="Tools for the kernels of trellis.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("compile", help="compile every registered kernel and print what it costs")
    command.add_argument("--arch", action="append", choices=tuple(ARCHS), help="target; repeatable, default all")
    command.add_argument("--match", default="", metavar="TEXT", help="only kernels whose name contains TEXT")
    command.add_argument(
        "--jobs", type=_positive, default=None, metavar="N", help="processes, default one for each CPU"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _compile(keys: Sequence[KernelKey], jobs: int | None, progress: TextIO) -> list[KernelReport]:
    """Reports in the order of the keys, with a counter on `progress` where that is a terminal."""
    done: dict[KernelKey, KernelReport] = {}
    for report in compile_reports(keys, jobs=jobs):
        done[report.key] = report
        if progress.isatty():
            print(f"\r{len(done)}/{len(keys)} compiled", end="", file=progress, flush=True)
    if progress.isatty():
        print(file=progress)
    return [done[key] for key in keys]


def _print_table(reports: Sequence[KernelReport]) -> None:
    width = max(len(str(report.key)) for report in reports)
    print("  ".join([f"{'kernel':{width}}", *_COLUMNS]))
    for report in reports:
        cells = [f"{getattr(report, column):>{len(column)}}" for column in _COLUMNS]
        print("  ".join([f"{report.key!s:{width}}", *(["failed: " + report.error] if report.error else cells)]))
