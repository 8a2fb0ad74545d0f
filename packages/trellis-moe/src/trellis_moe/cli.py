"""Owns the command line of trellis-moe.  It must not do the work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from trellis_format.activations import ACTIVATIONS
from trellis_format.errors import FormatError
from trellis_kernels import KernelError
from trellis_prep import PrepError

from trellis_moe.commands.demo import demo
from trellis_moe.commands.run import RunRequest, run
from trellis_moe.errors import MoeError

__all__ = ["main"]

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
_REFUSALS = (FormatError, PrepError, KernelError, MoeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        0 if all went well, 1 if the demo is outside its bounds, 2 if an argument or a file was refused.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
    except _REFUSALS as error:
        print(f"trellis-moe: error: {_printable(str(error))}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("trellis-moe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout went away; nothing is left to say
        return EXIT_FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trellis-moe", description="Mixture-of-experts layers from trellis-quantised checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("run", help="run one layer's experts over an input file")
    one.set_defaults(command=_run)
    one.add_argument("--checkpoint", type=Path, required=True, help="directory of an EXL3 checkpoint")
    one.add_argument("--layer", type=int, required=True, help="index of the layer")
    one.add_argument("--input", type=Path, required=True, help="safetensors with x, topk_ids, topk_weights")
    one.add_argument("--output", type=Path, required=True, help="safetensors that gets y, float32")
    one.add_argument("--tp-rank", type=int, help="tensor-parallel rank; the output is its partial sum")
    one.add_argument("--tp-size", type=int, help="number of tensor-parallel ranks")
    one.add_argument("--activation", choices=ACTIVATIONS, help="override what config.json says")
    one.add_argument("--pattern", help="regular expression of expert names, with groups layer, expert, projection")
    one.add_argument("--ignore-index", action="store_true", help="trust the shards where the index disagrees")
    show = commands.add_parser("demo", help="run a layer of the checkpoint in the repository and show its error")
    show.set_defaults(command=_demo)
    show.add_argument("--checkpoint", type=Path, help="another checkpoint of a model with a softmax router")
    show.add_argument("--layer", type=int, default=0, help="index of the layer (default 0)")
    show.add_argument("--tokens", type=int, default=40, help="random tokens for another checkpoint (default 40)")
    for command in (one, show):
        command.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _run(options: argparse.Namespace) -> int:
    if (options.tp_rank is None) != (options.tp_size is None):
        print("trellis-moe: error: --tp-rank and --tp-size go together", file=sys.stderr)
        return EXIT_REFUSED
    report = run(
        RunRequest(
            checkpoint=options.checkpoint,
            layer=options.layer,
            input=options.input,
            output=options.output,
            device=options.device,
            rank=options.tp_rank or 0,
            world_size=1 if options.tp_size is None else options.tp_size,
            activation=options.activation,
            pattern=options.pattern,
            ignore_index=options.ignore_index,
        ),
        show_progress=not options.json,
    )
    _show(report, options.json)
    return EXIT_OK


def _demo(options: argparse.Namespace) -> int:
    if options.tokens <= 0:
        print(f"trellis-moe: error: --tokens must be positive, got {options.tokens}", file=sys.stderr)
        return EXIT_REFUSED
    report = demo(
        checkpoint=options.checkpoint,
        layer=options.layer,
        device=options.device,
        tokens=options.tokens,
        show_progress=not options.json,
    )
    _show(report, options.json)
    return EXIT_OK if report["ok"] else EXIT_FAILED


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    geometry, seconds = report["geometry"], report["seconds"]
    table = Table(title=f"layer {report['layer']} of {_printable(report['checkpoint'])}", show_header=False)
    stored = "" if geometry["hidden_size"] == geometry["padded_hidden_size"] else f" (stored {geometry['padded_hidden_size']})"
    inner = geometry["intermediate_size"], geometry["padded_intermediate_size"]
    rows = {
        "experts": f"{geometry['num_experts']}, top {report['top_k']}",
        "hidden": f"{geometry['hidden_size']}{stored}",
        "intermediate": f"{inner[0]}" + (f" (stored {inner[1]})" if inner[0] != inner[1] else ""),
        "channels": f"{report['channels'][0]}..{report['channels'][1]} of {inner[1]}",
        "codebook, K": f"{report['codebook']}, {', '.join(f'{rate:g}' for rate in report['rates'])}",
        "activation": f"{report['activation']}, {report['io_dtype']} in",
        "tokens": str(report["tokens"]),
        "prepared": f"{report['prepared_bytes']:,} bytes, {report['code_bytes']:,} of them codes",
        "scratch": f"{report['scratch_bytes']:,} bytes",
        "device": report["device"],
        "path": ", ".join(f"{op}: {backend}" for op, backend in report["path"].items()),
        "seconds": ", ".join(f"{stage} {value:.3f}" for stage, value in seconds.items()),
    }
    for name, label in (("error_float64", "float64 reference"), ("error_exllamav3", "exllamav3's output")):
        if name in report:
            bound = report["bound_" + name.removeprefix("error_")]
            verdict = "within" if report[name] <= bound else "OUTSIDE"
            rows[f"error to {label}"] = f"{report[name]:.2e} relative L2, {verdict} {bound:.0e}"
    if "routes_agree" in report:
        rows["routes"] = "as exllamav3's" if report["routes_agree"] else "DIFFER from exllamav3's"
    if "output" in report:
        rows["output"] = _printable(report["output"])
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    Console().print(table)


def _printable(text: str) -> str:
    """Text without control characters, so that a name in a file cannot drive the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
