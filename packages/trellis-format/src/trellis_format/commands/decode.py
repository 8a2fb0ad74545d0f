"""Owns `trellis-format decode`: its arguments and what it prints.  It must not decode."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from trellis_format.checkpoint import open_checkpoint
from trellis_format.commands.streams import EXIT_OK, counted, emit, progress, refuse
from trellis_format.convert_source import ConvertSource, open_source
from trellis_format.decoded import StoredLinear, plan_decoded
from trellis_format.detect import container_of
from trellis_format.errors import FormatArgumentError, FormatError
from trellis_format.exl3.layers import group_modules
from trellis_format.exl3.linear import describe_linear
from trellis_format.terminal import printable
from trellis_format.writer import write_shard

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "decode",
        help="write one linear's weights as numbers",
        description="Decode one linear to a safetensors file with one matrix, input by output channels. Containers "
        "other than EXL3 have linears of experts, under the names that they had in EXL3.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of a checkpoint in any container")
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
            raise FormatArgumentError("already exists", file=out)
        with _opened(options) as linear:
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
        return refuse(error, out=out)
    line = f"wrote {printable(str(out))}: {printable(plan.name)} {plan.shape[0]} x {plan.shape[1]} {options.dtype}\n"
    return emit(lambda: sys.stdout.write(line), EXIT_OK)


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[StoredLinear]:
    module = options.tensor.removesuffix(".trellis")
    if container_of(options.path) == "exl3":
        with open_checkpoint(options.path, ignore_index=options.ignore_index) as checkpoint:
            linears = group_modules(checkpoint.tensors).linears
            if module not in linears:
                raise _unknown(checkpoint.path, module, linears)
            linear = describe_linear(module, linears[module])
            linear.check_marker()
            yield StoredLinear.of_exl3(linear)
    else:
        with closing(open_source(options.path)) as source:
            yield _of_container(source, module)


def _of_container(source: ConvertSource, module: str) -> StoredLinear:
    path, _, word = module.rpartition(".")
    prefix, _, expert = path.rpartition(".")
    for layer, names in source.names.items():
        projection = next((key for key, name in names.words.items() if name == word), None)
        if names.prefix == prefix and projection is not None and expert.isascii() and expert.isdigit():
            described, weights = source.read_layer(layer)
            if int(expert[:9]) < described.geometry.num_experts and projection in described.geometry.projections:
                return StoredLinear.of_layer(described, weights, int(expert[:9]), projection, module)
    known = [names.module(0, key) for names in source.names.values() for key in names.words]
    raise _unknown(source.path, module, known)


def _unknown(path: Path, module: str, known: Collection[str]) -> FormatArgumentError:
    near = difflib.get_close_matches(module, known, n=1)
    hint = f"nearest: {near[0]}" if near else f"it has {len(known)}"
    return FormatArgumentError(f"no linear of this name; {hint}", file=path, tensor=module)
