"""Owns the command line of trellis-kernels.  It must not know how a kernel is built.

trellis-kernels selfcheck                run every op against numpy; the first command after trouble
trellis-kernels compile --arch sm_90a    compile every registered kernel of one target, without a GPU
trellis-kernels cache info|clear         the compiled kernels that are kept between runs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

from trellis_format.version import version
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.cache import ObjectCache, default_cache
from trellis_kernels.cute.cost_table import compare_table, write_table
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.registry import registered_keys
from trellis_kernels.cute.report import KernelReport, compile_reports
from trellis_kernels.environment import CACHE_VARIABLE
from trellis_kernels.errors import KernelValueError
from trellis_kernels.selfcheck import environment_lines, run_checks

__all__ = ["main"]

_COLUMNS = ("registers", "stack_bytes", "shared_bytes", "code_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means those of this process.

    Returns:
        0; or 1 if a kernel failed to compile, spills, costs other than its table says, or none was selected, if a
        check failed, or if there is no cache; or 130 after an interrupt.  Wrong arguments exit with 2.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print("trellis-kernels: interrupted", file=sys.stderr)
        return 130
    return status


def _run_compile(options: argparse.Namespace) -> int:
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
    if not all(report.is_good for report in reports):
        return 1
    return 0 if options.table is None else _check_table(options.table, options.write_table, reports)


def _check_table(path: Path, write: bool, reports: Sequence[KernelReport]) -> int:
    if write:
        write_table(path, reports)
        return 0
    try:
        problems = compare_table(path, reports)
    except KernelValueError as error:
        problems = [str(error)]
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _run_cache(options: argparse.Namespace) -> int:
    cache = default_cache() if options.folder is None else ObjectCache(options.folder)
    if cache is None:
        print(f"there is no cache: {CACHE_VARIABLE} is off, or its folder cannot be used", file=sys.stderr)
        return 1
    if options.action == "clear":
        print(f"removed {cache.clear()} kernels from {cache.folder}")
        return 0
    info = cache.info()
    print(f"{info.folder}: {info.kernels} kernels, {info.size_bytes:,} of {info.max_bytes:,} bytes")
    return 0


def _run_selfcheck(options: argparse.Namespace) -> int:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"torch finds no CUDA device for {device}; `--device cpu` checks what needs none", file=sys.stderr)
        return 1
    print("\n".join(environment_lines(device)))
    failed = 0
    for check in run_checks(device):
        failed += not check.is_good
        print(f"{check.op:14}{check.case:16}{check.backend:6}{check.outcome}", flush=True)
    print(f"{failed} failed" if failed else "all good")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trellis-kernels", description="Tools for the kernels of trellis.")
    parser.add_argument("--version", action="version", version=f"trellis-kernels {version()}")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("compile", help="compile every registered kernel and print what it costs")
    command.add_argument("--arch", action="append", choices=tuple(ARCHS), help="target; repeatable, default all")
    command.add_argument("--match", default="", metavar="TEXT", help="only kernels whose name contains TEXT")
    command.add_argument(
        "--jobs", type=_positive, default=None, metavar="N", help="processes, default one for each CPU"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.add_argument("--table", type=Path, metavar="FILE", help="fail where costs differ from those in FILE")
    command.add_argument("--write-table", action="store_true", help="write FILE instead of comparing with it")
    command.set_defaults(run=_run_compile)
    command = commands.add_parser("cache", help="say how many compiled kernels are kept, or remove them")
    command.add_argument("action", choices=("info", "clear"))
    command.add_argument("--folder", type=Path, metavar="DIR", help=f"default: that of {CACHE_VARIABLE}")
    command.set_defaults(run=_run_cache)
    command = commands.add_parser("selfcheck", help="run every op of a device against numpy in float64")
    command.add_argument("--device", metavar="DEVICE", help="such as cuda:1 or cpu; default: cuda if there is one")
    command.set_defaults(run=_run_selfcheck)
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
