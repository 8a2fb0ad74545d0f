"""Owns `trellis-format decode`: its arguments and what it prints.  It must not decode."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.commands.streams import EXIT_OK, EXIT_UNUSABLE, complain, counted, emit, progress
from trellis_format.decoded import plan_decoded
from trellis_format.errors import FormatError, FormatValueError
from trellis_format.exl3.layers import group_modules
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.text import printable
from trellis_format.writer import write_shard

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "decode",
        help="write one linear's weights as numbers",
        description="Decode one EXL3 linear to a safetensors file with one matrix, input by output channels.",
    )
    parser.add_argument("path", metavar="PATH", help="folder with safetensors files")
    parser.add_argument("tensor", metavar="TENSOR", help="module name of a linear, with or without .trellis")
    parser.add_argument("out", metavar="OUT", help="safetensors file to write; it must not exist")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="default: float16")
    parser.add_argument(
        "--original-basis",
        action="store_true",
        help="undo scales and rotations: the weight of the model instead of the values that the codes stand for",
    )
    parser.add_argument("--ignore-index", action="store_true", help="do not compare the shards with the index")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    out = Path(options.out)
    try:
        if out.exists():
            raise FormatValueError("already exists", file=out)
        with open_checkpoint(options.path, ignore_index=options.ignore_index) as checkpoint:
            linear = _linear(checkpoint, options.tensor)
            linear.check_marker()
            plan = plan_decoded(linear, dtype=options.dtype, original_basis=options.original_basis)
            metadata = {
                "layout": "[in, out]",
                "basis": "original" if options.original_basis else "rotated",
                "codebook": linear.codebook.name,
                "bits_per_weight": str(linear.rate),
            }
            with progress("decode") as report:
                write_shard(out, [plan], metadata=metadata, on_bytes=counted(report, plan.nbytes))
    except FormatError as error:
        complain(str(error))
        return EXIT_UNUSABLE
    line = f"wrote {printable(str(out))}: {printable(plan.name)} {linear.k} x {linear.n} {options.dtype}\n"
    return emit(lambda: sys.stdout.write(line), EXIT_OK)


def _linear(checkpoint: Checkpoint, name: str) -> Exl3Linear:
    module = name.removesuffix(".trellis")
    linears = group_modules(checkpoint.tensors).linears
    if module not in linears:
        near = difflib.get_close_matches(module, linears, n=1)
        hint = f"; nearest: {near[0]}" if near else f"; it has {len(linears)}"
        raise FormatValueError(f"no EXL3 linear of this name{hint}", file=checkpoint.path, tensor=module)
    return describe_linear(module, linears[module])
