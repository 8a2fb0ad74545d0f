"""Owns the command `trellis-format`: its arguments, exit codes and streams.  It must not know what a report holds.

Exit codes: 0 when nothing is wrong; 1 when a file breaks a rule or holds what is refused with the reason; 2 when a path
cannot be opened, read or written or holds no checkpoint, or the command is used wrongly; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trellis_format.commands import convert, decode, synth, validate
from trellis_format.commands.streams import (
    EXIT_ERRORS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNUSABLE,
    complain,
    emit,
    emit_json,
    refuse,
)
from trellis_format.commands.validate import IGNORE_METHOD_HELP
from trellis_format.errors import FormatError
from trellis_format.exl3.names import DEFAULT_PATTERN
from trellis_format.inspect import inspect_checkpoint
from trellis_format.report import InspectReport
from trellis_format.terminal import keep_printing
from trellis_format.text import write_report
from trellis_format.validate_report import ValidateReport
from trellis_format.version import version

__all__ = ["EXIT_ERRORS", "EXIT_OK", "EXIT_UNUSABLE", "main"]

_REPORTS: dict[str, type[InspectReport] | type[ValidateReport]] = {"inspect": InspectReport, "validate": ValidateReport}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: those of the command line, without the program; default: `sys.argv`.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    keep_printing(sys.stdout)
    keep_printing(sys.stderr)
    try:
        if options.command == "schema":
            return emit_json(_REPORTS[options.report].json_schema(), EXIT_OK)
        if options.command == "inspect":
            return _inspect(options)
        return int(options.run(options))
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trellis-format",
        description="Say what a checkpoint of trellis-quantised weights holds and whether it is sound; convert it.",
        epilog="exit codes: 0 nothing is wrong, 1 a file breaks a rule or is refused with the reason, 2 a path "
        "cannot be opened, read or written, or wrong usage, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"trellis-format {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="report codebooks, rates, geometry and bytes, what is not read and why, and what breaks a rule",
        description="Report what a checkpoint holds and what breaks a rule. Reads headers and JSON, no tensor data.",
    )
    inspect.add_argument("path", metavar="PATH", help="folder of a checkpoint in any container")
    inspect.add_argument("--json", action="store_true", help="write the report as JSON, and nothing else, to stdout")
    inspect.add_argument(
        "--pattern",
        default=DEFAULT_PATTERN,
        metavar="REGEX",
        help="regular expression of the module name of an expert's linear, with groups layer, expert and projection",
    )
    inspect.add_argument("--ignore-index", action="store_true", help="do not compare the shards with the index")
    inspect.add_argument("--ignore-method", action="store_true", help=IGNORE_METHOD_HELP)
    schema = commands.add_parser("schema", help="write the JSON schema of what --json writes")
    schema.add_argument("report", nargs="?", choices=tuple(_REPORTS), default="inspect", help="default: inspect")
    for command in (validate, convert, synth, decode):
        command.add_parser(commands)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    try:
        report = inspect_checkpoint(
            options.path,
            pattern=options.pattern,
            ignore_index=options.ignore_index,
            ignore_method=options.ignore_method,
        )
    except FormatError as error:
        return refuse(error)
    code = EXIT_ERRORS if report.has_errors else EXIT_OK
    if options.json:
        return emit(lambda: sys.stdout.write(report.to_json() + "\n"), code)
    return emit(lambda: write_report(report, sys.stdout), code)
