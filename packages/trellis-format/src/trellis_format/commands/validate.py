"""Owns `trellis-format validate`: its arguments and what it prints.  It must not judge."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from trellis_format.commands.streams import EXIT_ERRORS, EXIT_OK, emit, progress, refuse
from trellis_format.errors import FormatError
from trellis_format.exl3.names import DEFAULT_PATTERN
from trellis_format.report import Severity
from trellis_format.terminal import printable
from trellis_format.validate import validate_checkpoint
from trellis_format.validate_report import ValidateReport

__all__ = ["IGNORE_METHOD_HELP", "add_parser", "run"]

IGNORE_METHOD_HELP = "trust the tensors where a configuration states another quant_method"
"""Help of the option that several commands have."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "validate",
        help="hold a checkpoint to every rule and say what to do about what breaks one",
        description="Hold a checkpoint to every rule: headers and JSON, and with --data what scales and markers hold.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of a checkpoint in any container")
    parser.add_argument("--data", action="store_true", help="read scales, biases, markers and hashes as well")
    parser.add_argument("--json", action="store_true", help="write the report as JSON, and nothing else, to stdout")
    parser.add_argument(
        "--pattern",
        default=DEFAULT_PATTERN,
        metavar="REGEX",
        help="regular expression of the module name of an expert's linear, with groups layer, expert and projection",
    )
    parser.add_argument("--ignore-index", action="store_true", help="do not compare the shards with the index")
    parser.add_argument("--ignore-method", action="store_true", help=IGNORE_METHOD_HELP)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    try:
        with progress("validate", show=options.data and not options.json) as on_progress:
            report = validate_checkpoint(
                options.path,
                data=options.data,
                pattern=options.pattern,
                ignore_index=options.ignore_index,
                ignore_method=options.ignore_method,
                on_progress=on_progress,
            )
    except FormatError as error:
        return refuse(error)
    code = EXIT_ERRORS if report.has_errors else EXIT_OK
    if options.json:
        return emit(lambda: sys.stdout.write(report.to_json() + "\n"), code)
    return emit(lambda: sys.stdout.writelines(f"{line}\n" for line in _lines(report)), code)


def _lines(report: ValidateReport) -> Iterator[str]:
    for finding in report.findings:
        where = " ".join(printable(part) for part in (finding.file, finding.tensor) if part)
        yield f"{finding.severity.value}  {finding.code}  {where}".rstrip()
        yield f"    {printable(finding.message)}"
        if finding.severity is not Severity.NOTE:
            yield f"    fix: {printable(finding.fix)}"
    checked = report.checked
    data = f", {checked.bytes_read:,} bytes of data read" if checked.data else ", headers alone"
    yield f"{report.container}: {checked.shards} shards, {checked.tensors} tensors, {checked.layers} layers{data}"
    counts = {word: sum(finding.severity is word for finding in report.findings) for word in Severity}
    yield ", ".join(f"{count} {word.value}{'' if count == 1 else 's'}" for word, count in counts.items())
