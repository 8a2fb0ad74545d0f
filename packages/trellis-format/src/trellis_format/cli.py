"""Owns the command `trellis-format`: its arguments, exit codes and streams.  It must not know what a report holds.

Exit codes: 0 when nothing is wrong, 1 when a finding is an error, 2 when the checkpoint cannot be opened or the command
is used wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from trellis_format.errors import FormatError
from trellis_format.exl3.names import DEFAULT_PATTERN
from trellis_format.inspect import inspect_checkpoint
from trellis_format.report import InspectReport
from trellis_format.text import printable, write_report
from trellis_format.version import version

__all__ = ["EXIT_ERRORS", "EXIT_OK", "EXIT_UNUSABLE", "main"]

EXIT_OK = 0
"""Nothing is wrong."""
EXIT_ERRORS = 1
"""A finding is an error."""
EXIT_UNUSABLE = 2
"""The checkpoint cannot be opened, or the command is used wrongly."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: those of the command line, without the program; default: `sys.argv`.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    _keep_printing(sys.stdout)
    _keep_printing(sys.stderr)
    if options.command == "schema":
        return _emit(lambda: _write_json(InspectReport.json_schema()), EXIT_OK)
    return _inspect(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trellis-format",
        description="Tell what a checkpoint of trellis-quantised weights holds, from its headers alone.",
        epilog="exit codes: 0 nothing is wrong, 1 a finding is an error, 2 the checkpoint cannot be opened",
    )
    parser.add_argument("--version", action="version", version=f"trellis-format {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="report codebooks, rates, geometry and bytes, what is not read and why, and what breaks a rule",
        description="Report what a checkpoint holds and what breaks a rule. Reads headers and JSON, no tensor data.",
    )
    inspect.add_argument("path", metavar="PATH", help="folder with safetensors files")
    inspect.add_argument("--json", action="store_true", help="write the report as JSON, and nothing else, to stdout")
    inspect.add_argument(
        "--pattern",
        default=DEFAULT_PATTERN,
        metavar="REGEX",
        help="regular expression of the module name of an expert's linear, with groups layer, expert and projection",
    )
    inspect.add_argument("--ignore-index", action="store_true", help="do not compare the shards with the index")
    commands.add_parser("schema", help="write the JSON schema of `inspect --json`")
    return parser


def _inspect(options: argparse.Namespace) -> int:
    try:
        report = inspect_checkpoint(options.path, pattern=options.pattern, ignore_index=options.ignore_index)
    except FormatError as error:
        _complain(str(error))
        return EXIT_UNUSABLE
    code = EXIT_ERRORS if report.has_errors else EXIT_OK
    if options.json:
        return _emit(lambda: sys.stdout.write(report.to_json() + "\n"), code)
    return _emit(lambda: write_report(report, sys.stdout), code)


def _emit(write: Callable[[], object], code: int) -> int:
    """Write to stdout; the exit code stays what it is when the reader stops reading."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer must not fail again when the interpreter flushes it.
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
        if isinstance(error, BrokenPipeError):
            return code
        _complain(f"stdout cannot be written: {error.strerror or error}")
        return EXIT_UNUSABLE
    return code


def _write_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _complain(message: str) -> None:
    sys.stderr.write(f"trellis-format: {printable(message)}\n")


def _keep_printing(stream: TextIO) -> None:
    """Escape what the stream's encoding lacks: a name must not end the report."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
