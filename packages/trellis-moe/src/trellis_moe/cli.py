"""Owns the command line of trellis-moe.  It must not do the work.

What loads torch or numpy is imported where it is used, under `main`: an interrupt while it loads is one like any other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trellis_format.terminal import complain, drop_output, keep_printing, open_streams, printable
from trellis_moe.errors import MoeError, MoeValueError
from trellis_moe.memory import is_out_of_memory

__all__ = ["main"]

_ERRORS = {
    "trellis_format.errors": "FormatError",
    "trellis_prep.errors": "PrepError",
    "trellis_kernels.errors": "KernelError",
}
_MOST_LETTERS = 300  # of another library's message
EXIT_OK, EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        0 if all went well; 1 if the demo is outside its bounds, the doctor finds something wrong, a table is stale or
        stdout cannot be written; 2 if an argument or a file was refused, or memory ran out; 130 after
        an interrupt.
    """
    open_streams()
    keep_printing(sys.stdout)
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
        sys.stdout.flush()  # here, where a failure can be told
    except KeyboardInterrupt:
        _tell("interrupted")
        return EXIT_INTERRUPTED
    except _refusals() as error:
        _tell(f"error: {error}")
        return EXIT_REFUSED
    except BrokenPipeError:
        drop_output()  # its reader went away; nothing is left to say
        return EXIT_FAILED
    except OSError as error:
        if error.filename is not None:
            _tell(f"error: {error.filename}: {error.strerror or error}")
            return EXIT_REFUSED
        drop_output()
        _tell(f"error: standard output: {error.strerror or error}")
        return EXIT_FAILED
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _tell(f"error: out of memory: {' '.join(str(error).split())[:_MOST_LETTERS]}")
        return EXIT_REFUSED
    return code


def _refusals() -> tuple[type[Exception], ...]:
    """What the packages raise on purpose; one that is not loaded has raised nothing, and is not loaded for this."""
    return MoeError, *(getattr(sys.modules[home], name) for home, name in _ERRORS.items() if home in sys.modules)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of the command are."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"{self.prog}: error: {printable(message)} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    from trellis_format.activations import ACTIVATIONS
    from trellis_format.version import version
    from trellis_moe.commands.bench import add_parser as add_bench
    from trellis_moe.commands.doctor import add_parser as add_doctor
    from trellis_moe.commands.generate import add_parser as add_generate

    parser = _Parser(prog="trellis-moe", description="Mixture-of-experts layers from trellis-quantised checkpoints.")
    parser.add_argument("--version", action="version", version=f"trellis-moe {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("run", help="run one layer's experts over an input file")
    one.set_defaults(command=_run)
    one.add_argument(
        "--checkpoint", type=Path, required=True, help="directory of an EXL3, exl3-v1 or native checkpoint"
    )
    one.add_argument("--layer", type=int, required=True, help="index of the layer")
    one.add_argument("--input", type=Path, required=True, help="safetensors with x, topk_ids, topk_weights")
    one.add_argument("--output", type=Path, required=True, help="safetensors that gets y, float32")
    one.add_argument("--tp-rank", type=int, help="tensor-parallel rank; the output is its partial sum")
    one.add_argument("--tp-size", type=int, help="number of tensor-parallel ranks")
    one.add_argument("--pattern", help="regular expression of expert names, with groups layer, expert, projection")
    one.add_argument("--ignore-index", action="store_true", help="trust the shards where the index disagrees")
    show = commands.add_parser("demo", help="run a layer of the checkpoint in the repository and show its error")
    show.set_defaults(command=_demo)
    show.add_argument("--checkpoint", type=Path, help="another checkpoint of a model with a softmax router")
    show.add_argument("--layer", type=int, default=0, help="index of the layer (default 0)")
    show.add_argument("--tokens", type=int, default=40, help="random tokens for another checkpoint (default 40)")
    for command in (one, show):
        command.add_argument("--activation", choices=ACTIVATIONS, help="override what config.json says")
        command.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_bench(commands, _say)
    add_doctor(commands)
    add_generate(commands, _say)
    return parser


def _run(options: argparse.Namespace) -> int:
    if (options.tp_rank is None) != (options.tp_size is None):
        alone = "--tp-rank" if options.tp_size is None else "--tp-size"
        raise MoeValueError(f"{alone} is given alone; --tp-rank and --tp-size go together")
    from trellis_moe.commands.run import RunRequest, run

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
        warn=_warn,
    )
    _show(report, options.json)
    return EXIT_OK


def _demo(options: argparse.Namespace) -> int:
    if options.tokens <= 0:
        raise MoeValueError(f"--tokens must be positive, got {options.tokens}")
    from trellis_moe.commands.demo import demo

    report = demo(
        checkpoint=options.checkpoint,
        layer=options.layer,
        device=options.device,
        tokens=options.tokens,
        activation=options.activation,
        show_progress=not options.json,
        warn=_warn,
    )
    _show(report, options.json)
    return EXIT_OK if report["ok"] else EXIT_FAILED


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    geometry, seconds = report["geometry"], report["seconds"]
    title = Text(f"layer {report['layer']} of {printable(report['checkpoint'])}")  # a str would be read as markup
    table = Table(title=title, show_header=False)
    rows = {
        "experts": f"{geometry['num_experts']}, top {report['top_k']}",
        "hidden": _width(geometry["hidden_size"], geometry["padded_hidden_size"]),
        "intermediate": _width(geometry["intermediate_size"], geometry["padded_intermediate_size"]),
        "channels": f"{report['channels'][0]}..{report['channels'][1]} of {geometry['padded_intermediate_size']}",
        "codebook, K": f"{report['codebook']}, {', '.join(f'{rate:g}' for rate in report['rates'])}",
        "activation": f"{_law(report)}, {report['io_dtype']} in",
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
    if report["non_finite_tokens"]:
        rows["not finite"] = f"{report['non_finite_tokens']} of {report['tokens']} tokens have infinities or NaN"
    if "output" in report:
        rows["output"] = printable(report["output"])
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    Console().print(table)


def _law(report: dict[str, Any]) -> str:
    """The activation, with its constants where it has any."""
    constants = report["activation_constants"]
    if constants["limit"] is None and (constants["alpha"], constants["beta"]) == (1.0, 0.0):
        return str(report["activation"])
    stated = ", ".join(f"{name} {value:g}" for name, value in constants.items() if value is not None)
    return f"{report['activation']} ({stated})"


def _width(size: int, stored: int) -> str:
    return str(size) if size == stored else f"{size} (stored {stored})"


def _warn(warning: str) -> None:
    _tell(f"warning: {warning}")


def _say(line: str) -> None:
    """A line of progress on stderr, where there is one."""
    if sys.stderr is not None:
        print(printable(line), file=sys.stderr, flush=True)


def _tell(message: str) -> None:
    """One line on stderr, where there is one."""
    complain("trellis-moe", message)
