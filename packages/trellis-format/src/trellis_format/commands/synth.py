"""Owns `trellis-format synth`: its arguments and what it prints.  It must not make tensors."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trellis_format.codebooks import CODEBOOKS
from trellis_format.commands.streams import EXIT_OK, EXIT_UNUSABLE, complain, counted, emit, emit_json, progress, refuse
from trellis_format.detect import CONTAINERS
from trellis_format.errors import FormatError, FormatUnsupportedError
from trellis_format.rates import Rate
from trellis_format.synth import SynthSpec, plan_synthetic, synth_checkpoint
from trellis_format.synth_names import NAMINGS
from trellis_format.synth_source import synth_container
from trellis_format.terminal import printable

__all__ = ["SCHEMA", "SCHEMA_VERSION", "add_parser", "run"]

SCHEMA = "trellis-format/synth"
"""Name of the schema of `--json`."""
SCHEMA_VERSION = 1
"""Version of that schema."""
_TOP_K = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "synth",
        help="write a random checkpoint of any geometry",
        description="Write a checkpoint of random codes and scales. The same arguments give the same bytes.",
    )
    parser.add_argument("out", metavar="OUT", help="directory to write; it must not exist, or be empty")
    parser.add_argument("--hidden", type=int, required=True, metavar="CHANNELS", help="hidden size")
    parser.add_argument("--intermediate", type=int, required=True, metavar="CHANNELS", help="width of an expert")
    parser.add_argument("--experts", type=int, required=True, help="routed experts of a layer")
    parser.add_argument("--layers", type=int, default=1, help="layers (default: 1)")
    parser.add_argument("--top-k", type=int, help="routes of a token (default: 2, or the experts if fewer)")
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument("--rate", default="3", metavar="K", help="bits per weight, such as 3 or 2.5 (default: 3)")
    rates.add_argument("--rates", metavar="K,K,...", help="rates to draw from at random")
    parser.add_argument(
        "--mix",
        choices=("layer", "expert", "projection"),
        default="projection",
        help="what draws a rate of its own with --rates (default: projection)",
    )
    parser.add_argument("--codebook", choices=tuple(CODEBOOKS), default="mul1", help="default: mul1")
    parser.add_argument("--container", choices=CONTAINERS, default="exl3", help="default: exl3")
    parser.add_argument("--naming", choices=tuple(NAMINGS), default="qwen3", help="architecture (default: qwen3)")
    parser.add_argument("--shards", type=int, default=1, help="most safetensors files to write (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--dense", action="store_true", help="make attention, shared experts, embedding and head too")
    parser.add_argument("--sparse", action="store_true", help="leave holes for codes, zeros that take no room on disk")
    parser.add_argument("--json", action="store_true", help="write a JSON object, and nothing else, to stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    try:
        spec = _spec(options)
        total = sum(tensor.nbytes for tensor in plan_synthetic(spec))
        with progress("synth", show=not options.json) as report:
            if options.container == "exl3":
                synth_checkpoint(options.out, spec, on_bytes=counted(report, total))
            else:
                total = synth_container(options.out, spec, options.container, on_bytes=counted(report, total))
    except FormatUnsupportedError as error:
        return refuse(error)
    except FormatError as error:  # nothing is read, so an argument or the destination is at fault
        complain(str(error))
        return EXIT_UNUSABLE
    tensors = sum(1 for _ in plan_synthetic(spec))
    if options.json:
        return emit_json(_summary(options, spec, tensors, total), EXIT_OK)
    line = f"wrote {printable(options.out)}: {tensors} tensors, {total:,} bytes\n"
    return emit(lambda: sys.stdout.write(line), EXIT_OK)


def _spec(options: argparse.Namespace) -> SynthSpec:
    return SynthSpec(
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=options.experts,
        layers=options.layers,
        top_k=min(_TOP_K, options.experts) if options.top_k is None else options.top_k,
        rates=tuple(Rate.of(word.strip()) for word in (options.rates or options.rate).split(",")),
        mix=options.mix,
        codebook=options.codebook,
        naming=options.naming,
        shards=options.shards,
        seed=options.seed,
        dense=options.dense,
        sparse=options.sparse,
    )


def _summary(options: argparse.Namespace, spec: SynthSpec, tensors: int, total: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "path": options.out,
        "container": options.container,
        "tensors": tensors,
        "bytes": total,
        "codebook": spec.codebook,
        "rates": [str(rate) for rate in spec.rates],
        "seed": spec.seed,
    }
