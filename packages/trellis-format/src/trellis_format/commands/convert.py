"""Owns `trellis-format convert`: its arguments and what it prints.  It must not convert."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from trellis_format.commands.streams import EXIT_OK, emit, emit_json, progress, refuse
from trellis_format.convert import (
    ASSUMED_BYTES_PER_SECOND,
    ConvertPlan,
    check_shards,
    convert,
    parse_layers,
    plan_conversion,
)
from trellis_format.convert_source import open_source
from trellis_format.detect import CONTAINERS
from trellis_format.errors import FormatError
from trellis_format.exl3.names import DEFAULT_PATTERN
from trellis_format.terminal import printable

__all__ = ["SCHEMA", "SCHEMA_VERSION", "add_parser", "run"]

SCHEMA = "trellis-format/convert"
"""Name of the schema of `--json`."""
SCHEMA_VERSION = 1
"""Version of that schema."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint in another container, without loss or not at all",
        description="Write a checkpoint in another container. Nothing is decoded or quantised again: what the "
        "container cannot hold bit for bit is refused with the reason. An interrupted conversion continues when the "
        "same command is run again.",
    )
    parser.add_argument("source", metavar="SRC", help="folder of a checkpoint in any container")
    parser.add_argument("destination", metavar="DST", help="folder to write; it must not exist, or be empty")
    parser.add_argument("--to", required=True, choices=CONTAINERS, help="container to write")
    parser.add_argument("--layers", metavar="0,2-5", help="carry the experts of these layers alone")
    parser.add_argument("--shards", type=int, help="most EXL3 shards to write (default: shards of 8 GiB)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="write a JSON object, and nothing else, to stdout")
    parser.add_argument(
        "--pattern",
        default=DEFAULT_PATTERN,
        metavar="REGEX",
        help="regular expression of the module name of an expert's linear, with groups layer, expert and projection",
    )
    parser.add_argument("--ignore-index", action="store_true", help="do not compare the shards with the index")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    try:
        if options.shards is not None:
            check_shards(options.shards)
        layers = None if options.layers is None else parse_layers(options.layers)
        opened = open_source(options.source, pattern=options.pattern, ignore_index=options.ignore_index)
        with closing(opened) as source:
            if options.dry_run:
                plan = plan_conversion(source, options.to, layers=layers)
            else:
                with progress("convert", show=not options.json) as on_progress:
                    plan = convert(
                        source,
                        options.destination,
                        options.to,
                        layers=layers,
                        shards=options.shards,
                        on_progress=on_progress,
                    )
    except FormatError as error:
        return refuse(error, out=options.destination)
    if options.json:
        return emit_json(_object(options, plan), EXIT_OK)
    return emit(lambda: sys.stdout.writelines(f"{line}\n" for line in _lines(options, plan)), EXIT_OK)


def _lines(options: argparse.Namespace, plan: ConvertPlan) -> Iterator[str]:
    verb = "would write" if options.dry_run else "wrote"
    yield f"{verb} {printable(options.destination)}: {plan.source} to {plan.target}, {plan.nbytes:,} bytes"
    yield f"  layers   {len(plan.layers)} of {len(plan.layers) + len(plan.left_out)}"
    for name in ("code", "scale", "outside", "file"):
        yield f"  {name:<8} {getattr(plan, f'{name}_bytes'):,} bytes"
    if options.dry_run:
        yield f"  time     {plan.seconds:.1f} s at {ASSUMED_BYTES_PER_SECOND / 1e6:.0f} MB/s"


def _object(options: argparse.Namespace, plan: ConvertPlan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "source_path": options.source,
        "destination_path": options.destination,
        "dry_run": options.dry_run,
        **asdict(plan),
        "bytes": plan.nbytes,
        "seconds": plan.seconds,
    }
