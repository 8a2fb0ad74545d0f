"""Owns the command line of the check, and the order of its parts.  It must not compare or time."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trellis_moe.errors import MoeError, MoeValueError

if TYPE_CHECKING:
    from trellis_moe.dist_check.build import Request
    from trellis_moe.dist_check.ranks import Process
    from trellis_moe.dist_check.report import Agreement, MemoryUse, Report

__all__ = ["main"]

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
_TOKENS = {"cuda": (1, 8, 64, 1024, 8192), "cpu": (1, 8, 24)}
_LAYERS = ("glm-4.5-air:mul1:3", "deepseek-v3:mcg:3")
_LAUNCH_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, as one rank or as what starts them.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        0 if all went well, 1 if something is not as it has to be, 2 if an argument was refused; a rank that finds
        another one gone leaves with 3.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    try:
        if options.launch is not None:
            return _launch(options, words)
        return _check(options)
    except MoeError as error:
        print(f"dist_check: error: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dist_check", description="Compare a layer that ranks share with the same layer on one rank."
    )
    parser.add_argument("--launch", type=int, metavar="N", help="start N ranks here instead of being one of torchrun's")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU for each rank, where there are")
    parser.add_argument("--share-gpus", action="store_true", help="ranks may share a GPU, over gloo; results alone")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="token counts that are compared")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds of a collective (default 60)")
    parser.add_argument("--kill-rank", type=int, metavar="R", help="only: rank R dies, the others must say so")
    parser.add_argument("--skip-agreement", action="store_true", help="do not compare")
    parser.add_argument("--times", action="store_true", help="also time large layers, on one rank and on all")
    parser.add_argument("--layers", nargs="+", default=_LAYERS, metavar="NAME", help="presets that are timed")
    parser.add_argument("--time-tokens", type=int, nargs="+", default=(8, 1024, 8192), metavar="T", help="of the times")
    parser.add_argument("--samples", type=int, default=10, help="of each time, 5 to 64 (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes")
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="where the times go")
    parser.add_argument("--commit", metavar="SHA", help="of the sources; needed where they are no git checkout")
    parser.add_argument("--dirty", action="store_true", help="say that the sources differ from that commit")
    return parser


def _launch(options: argparse.Namespace, words: list[str]) -> int:
    from trellis_moe.dist_check.launch import judge_loss, launch

    if options.launch < 1:
        raise MoeValueError(f"--launch must be at least 1, got {options.launch}")
    place = words.index("--launch") if "--launch" in words else None
    passed = [word for word in words if not word.startswith("--launch=")] if place is None else words
    if place is not None:
        passed = words[:place] + words[place + 2 :]
    ended = launch(options.launch, passed, seconds=_LAUNCH_SECONDS)
    if options.kill_rank is None:
        for rank, end in enumerate(ended):
            if rank == 0 or end.code:
                sys.stderr.write(end.err)
        return max(end.code if end.code >= 0 else EXIT_FAILED for end in ended)
    faults = judge_loss(ended, options.kill_rank, options.timeout)
    for rank, end in enumerate(ended):
        last = (end.err.strip().splitlines() or ["nothing"])[-1]
        print(f"rank {rank}: exit code {end.code} after {end.seconds:.1f} s, said: {last}")
    for fault in faults:
        print(f"dist_check: {fault}", file=sys.stderr)
    return EXIT_FAILED if faults else EXIT_OK


def _check(options: argparse.Namespace) -> int:
    from trellis_moe.dist_check.launch import EXIT_LOST
    from trellis_moe.dist_check.ranks import join_ranks, leave_at_once
    from trellis_moe.errors import MoeDistributedError

    try:
        with join_ranks(options.device, options.timeout, share_gpus=options.share_gpus) as process:
            if options.kill_rank is not None:
                _lose(process, options)
            report = _measure(process, options)
    except MoeDistributedError as error:
        print(f"dist_check: {error}", file=sys.stderr)
        leave_at_once(EXIT_LOST)
        raise
    if process.leads:
        _show(report, options.json)
    return EXIT_OK if report.ok else EXIT_FAILED


def _request(process: Process, options: argparse.Namespace) -> Request:
    from trellis_format.activations import Activation
    from trellis_kernels.bench.layers import random_source
    from trellis_moe.dist_check.build import Request
    from trellis_moe.dist_check.samples import noise_weights

    on_gpu = process.device.type == "cuda"
    experts, hidden = (16, 1024) if on_gpu else (4, 256)
    source = random_source(experts=experts, hidden=hidden, intermediate=11 * 128, codebook="mul1", rates=["3"])
    source = dataclasses.replace(source, activation=Activation("silu"))
    tokens = tuple(sorted(options.tokens or _TOKENS[process.device.type]))
    return Request(source, noise_weights(source), tokens, 4 if on_gpu else 2, "float16", "float16", process.device)


def _lose(process: Process, options: argparse.Namespace) -> None:
    from trellis_moe.dist_check.launch import EXIT_LOST
    from trellis_moe.dist_check.loss import run_until_lost
    from trellis_moe.dist_check.ranks import leave_at_once

    if not 0 <= options.kill_rank < process.world or process.world < 2:
        raise MoeValueError(f"--kill-rank {options.kill_rank} of {process.world} ranks: needs another one that is left")
    request = dataclasses.replace(_request(process, options), token_counts=(8,))
    print(f"dist_check: {run_until_lost(process, request, options.kill_rank)}", file=sys.stderr)
    leave_at_once(EXIT_LOST)


def _measure(process: Process, options: argparse.Namespace) -> Report:
    from trellis_moe.dist_check.agreement import check_agreement
    from trellis_moe.dist_check.report import Report

    agreements: list[Agreement] = []
    if not options.skip_agreement:
        for found in check_agreement(process, _request(process, options), graphs=process.captures):
            agreements.append(found)
            fault = "" if found.ok else "  NOT AS IT HAS TO BE"
            process.say(f"{found.way}, {found.tokens} tokens, {found.mode}: error {found.error:.1e}{fault}")
    memory = _times(process, options) if options.times else ()
    everyone = _gathered(process, (tuple(agreements), memory))
    return Report(
        world_size=process.world,
        device=_device_name(process),
        backend="nccl" if process.captures else "gloo",
        agreements=tuple(each for found, _ in everyone for each in found),
        memory=tuple(each for _, found in everyone for each in found),
        ok=all(each.ok for parts in everyone for found in parts for each in found),
    )


def _times(process: Process, options: argparse.Namespace) -> tuple[MemoryUse, ...]:
    import torch

    from trellis_moe.bench.ceilings import measure_copy, measure_gemm
    from trellis_moe.bench.machine import find_commit
    from trellis_moe.bench.presets import get_preset
    from trellis_moe.bench.record import Recorder
    from trellis_moe.dist_check.times import time_layer

    if options.share_gpus:
        raise MoeValueError("--times of ranks that share a GPU say nothing; leave --share-gpus out")
    commit = find_commit(options.commit, dirty=options.dirty)
    recorder = None
    if process.leads:
        recorder = Recorder(
            process.device, seconds=_LAUNCH_SECONDS, samples=options.samples, tell=process.say, count=process.world
        )
        recorder.attempt("device copy", partial(measure_copy, recorder))
        recorder.attempt("bf16 GEMM", partial(measure_gemm, recorder))
        if process.device.type == "cuda":
            torch.cuda.empty_cache()
    memory: list[MemoryUse] = []
    for name in options.layers:
        try:
            preset = get_preset(name)
            memory.extend(time_layer(process, preset, options.time_tokens, samples=options.samples, recorder=recorder))
        finally:  # what was measured before a rank was lost stays
            if recorder is not None and recorder.rows and options.receipt is not None:
                receipt = recorder.receipt("python -m trellis_moe.dist_check --times", commit)
                options.receipt.write_text(receipt.model_dump_json(by_alias=True, indent=1) + "\n")
    return tuple(memory)


def _gathered(process: Process, mine: Any) -> list[Any]:
    import torch.distributed as dist

    everyone: list[Any] = [None] * process.world
    dist.all_gather_object(everyone, mine)
    return everyone


def _device_name(process: Process) -> str:
    import torch

    return torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "cpu"


def _show(report: Report, path: Path | None) -> None:
    if path is not None:
        path.write_text(report.model_dump_json(indent=1) + "\n")
    worst: dict[str, Agreement] = {}
    for found in report.agreements:
        if found.way not in worst or (found.ok, -found.error) < (worst[found.way].ok, -worst[found.way].error):
            worst[found.way] = found
    for way, found in worst.items():
        bits = "no bit differs" if all(each.equal for each in report.agreements if each.way == way) else "sums differ"
        print(f"{way}: at most {found.error:.1e} relative L2, {bits}{'' if found.ok else ': NOT AS IT HAS TO BE'}")
    for use in report.memory:
        verdict = "as planned" if use.ok else "NOT AS PLANNED"
        print(f"{use.layer}, rank {use.rank}: planned {use.planned_bytes:,} bytes, peak {use.peak_bytes:,}: {verdict}")
    print(f"{report.world_size} ranks of {report.device} over {report.backend}: {'ok' if report.ok else 'NOT OK'}")
