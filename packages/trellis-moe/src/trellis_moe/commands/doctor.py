"""Owns `trellis-moe doctor`: what a machine can run, a self-check, and a block for a report of trouble.

It must not show a user's paths or names.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from typing import Any

__all__ = ["Finding", "add_parser", "doctor"]

DOCTOR_SCHEMA = "trellis-moe/doctor"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: in a few words.
        state: `ok`, `note` (kernels cannot run, the torch backend can) or `bad`.
        text: what was found.
    """

    what: str
    state: str
    text: str


def add_parser(commands: Any) -> None:
    """Add `doctor` to the subcommands of the command line; see `argparse.ArgumentParser.add_subparsers`."""
    one = commands.add_parser("doctor", help="say what this machine can run, and check that it does")
    one.set_defaults(command=_run)
    one.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    one.add_argument("--quick", action="store_true", help="leave the self-check out")
    one.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _run(options: argparse.Namespace) -> int:
    from trellis_moe.commands.layer import choose_device

    findings = doctor(choose_device(options.device), checks=not options.quick)
    if options.json:
        report = {
            "schema": DOCTOR_SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "findings": [vars(finding) for finding in findings],
            "ok": all(finding.state != "bad" for finding in findings),
        }
        print(json.dumps(report, indent=2))
    else:
        _show(findings)
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def doctor(device: Any, *, checks: bool = True) -> list[Finding]:
    """Look at this machine.

    Args:
        device: a `torch.device` to check.
        checks: whether to run the self-check, which takes up to a minute, more where kernels must be compiled first.

    Returns:
        Findings in the order in which they matter: versions, driver, device, compiler, cache, self-check.
    """
    findings = [*_versions(), _driver(), _device(device), _compiler(device), _cache()]
    return [*findings, *_self_check(device)] if checks else findings


def _versions() -> list[Finding]:
    import torch

    from trellis_format.version import version

    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return [
        Finding("trellis", "ok", f"trellis {version()}, {system}"),
        Finding("torch", "ok", f"torch {torch.__version__}, built with CUDA {torch.version.cuda or 'none'}"),
    ]


def _driver() -> Finding:
    from trellis_moe.bench.machine import driver_version

    found = driver_version()
    return Finding("driver", "note", "nvidia-smi tells of none") if found is None else Finding("driver", "ok", found)


def _device(device: Any) -> Finding:
    import torch

    from trellis_kernels.layers import device_limits
    from trellis_moe.support import TESTED_ON

    if device.type != "cuda":
        return Finding("device", "note", "cpu: the torch backend alone, made to be checked against and not to be fast")
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    memory = f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.1f} GiB"
    text = f"{properties.name}, {capability}, {memory}"
    limits = device_limits(device)
    if limits is None:
        return Finding("device", "bad", f"{text}: no compile target covers it")
    tested = f"tested on {TESTED_ON[limits.arch]}" if limits.arch in TESTED_ON else "compiled for, never run by us"
    return Finding("device", "ok", f"{text}: compile target {limits.arch}, {tested}")


def _compiler(device: Any) -> Finding:
    from trellis_kernels.selfcheck import compiler_state

    found, failure = compiler_state()
    if found is None:
        state = "bad" if device.type == "cuda" else "note"
        return Finding("nvidia-cutlass-dsl", state, "not installed: kernels can be neither compiled nor launched")
    if failure is not None:
        return Finding("nvidia-cutlass-dsl", "bad", f"{found} is installed, and importing it raises {failure}")
    return Finding("nvidia-cutlass-dsl", "ok", f"{found}, can be imported")


def _cache() -> Finding:
    import warnings

    from trellis_kernels.cute.cache import default_cache
    from trellis_kernels.environment import CACHE_VARIABLE, cache_folder

    if cache_folder() is None:
        return Finding("kernel cache", "note", f"turned off by {CACHE_VARIABLE}: each process compiles anew")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the finding says it, without the folder
        cache = default_cache()
    if cache is None:
        return Finding(
            "kernel cache", "bad", "its folder cannot be used, or others may write it; see trellis-kernels cache"
        )
    info = cache.info()
    return Finding("kernel cache", "ok", f"{info.kernels} kernels, {info.size_bytes:,} of {info.max_bytes:,} bytes")


def _self_check(device: Any) -> list[Finding]:
    from trellis_kernels.selfcheck import run_checks

    outcomes = list(run_checks(device))
    bad = [check for check in outcomes if not check.is_good]
    skipped = sum(check.outcome.startswith("skipped") for check in outcomes)
    count = f"{len(outcomes)} comparisons of ops with numpy, {skipped} skipped"
    if not bad:
        return [Finding("self-check", "ok", f"{count}, all good")]
    first = [
        Finding("self-check", "bad", f"{check.op} {check.case} on {check.backend}: {_without_paths(check.outcome)}")
        for check in bad[:8]
    ]
    return [*first, Finding("self-check", "bad", f"{count}, {len(bad)} failed")]


def _without_paths(text: str) -> str:
    """A message without words that look like paths, which may name the user."""
    return " ".join("PATH" if "/" in word or "\\" in word else word for word in text.split())[:300]


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="trellis-moe doctor", show_header=False)
    for finding in findings:
        style = {"ok": "green", "note": "yellow", "bad": "red"}[finding.state]
        table.add_row(Text(finding.what), Text(finding.state, style=style), Text(finding.text))
    Console().print(table)
    print("For a report of trouble, paste this:\n\n```text")
    for finding in findings:
        print(f"{finding.state:5}{finding.what}: {finding.text}")
    print("```")
