"""Owns `trellis-moe generate`: its arguments and what it prints.  It must not do the work.

What loads torch is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trellis_moe.errors import MoeValueError

__all__ = ["add_parser", "printable_text", "run"]

_EXIT_OK = 0


def add_parser(commands: argparse._SubParsersAction[Any], say: Callable[[str], None]) -> None:
    """Add the subcommand.

    Args:
        commands: of the program's parser.
        say: writes a line on stderr.
    """
    parser = commands.add_parser(
        "generate",
        help="continue a prompt with a whole EXL3 model, through Hugging Face transformers",
        description="Continue a prompt, printing text as it comes. Needs the extra `transformers`.",
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of an EXL3 checkpoint")
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument("--ids", help="token ids to continue, separated by commas, in place of text")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens to generate (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of the draws at a temperature above 0 (default 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="of activations (default: the checkpoint's)"
    )
    parser.add_argument(
        "--static", action="store_true", help="a static cache; on a GPU steps become CUDA graphs, after a compilation"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout at the end")
    parser.set_defaults(command=lambda options: run(options, say))


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the subcommand; returns the exit code.

    Raises:
        FormatError, PrepError, MoeError: if something is refused.
    """
    from trellis_moe.commands.generation import GenerateRequest, generate

    def warn(warning: str) -> None:
        say(f"trellis-moe: warning: {warning}")

    request = GenerateRequest(
        model=options.model,
        prompt=options.prompt,
        ids=None if options.ids is None else _ids(options.ids),
        device=options.device,
        dtype=options.dtype,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        is_static=options.static,
    )
    if options.json:
        print(json.dumps(generate(request, show_progress=False, warn=warn), indent=2))
        return _EXIT_OK
    report = generate(request, show=_show, warn=warn, begin_with=lambda: _show(request.prompt or ""))
    print()
    for line in _summary(report):
        say(line)
    return _EXIT_OK


def printable_text(text: str) -> str:
    """Text that may stand on a terminal: line breaks and tabs stay, other control characters do not."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _show(text: str) -> None:
    sys.stdout.write(printable_text(text))
    sys.stdout.flush()


def _summary(report: dict[str, Any]) -> list[str]:
    seconds, rate = report["seconds"], report["tokens_per_second"]
    counts = f"{report['expert_layers']} layers of experts and {report['linears']} other linears"
    tokens = f"{len(report['prompt_ids'])} tokens in, {len(report['new_ids'])} out"
    place = f"{report['model_type']} on {report['device']} in {report['dtype']}"
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    return [
        f"{place}: {counts}, loaded in {seconds['load']:.1f} s",
        f"{tokens}: the first after {seconds['first_token']:.2f} s{speed}",
    ]


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise MoeValueError(f"--ids takes integers separated by commas, got {text!r}") from None
