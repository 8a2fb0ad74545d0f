"""Owns the command `python -m trellis_moe.soak`: arguments, the order of the steps, and the exit code.

It must not measure.  SIGTERM and Ctrl-C end the load after the run at hand, and what held until then is still reported.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from trellis_moe.plan import ExecutionPlan
from trellis_moe.session import Session
from trellis_moe.soak.layers import SoakLayer, SoakSizes, bind_layers, plan_layers
from trellis_moe.soak.load import Graphs, Outcome, run_load
from trellis_moe.soak.report import LayerReport, SoakReport

__all__ = ["GRAPH_COUNTS", "SMALL", "main", "soak"]

GRAPH_COUNTS = (1, 3, 8, 17, 32, 128, 700, 8192)
"""Token counts that are captured: launches filled to the last token, and not."""
SMALL = SoakSizes(
    layers=4,
    experts=4,
    hidden=256,
    intermediate=128,
    top_k=2,
    max_tokens=40,
    token_counts=(1, 8),
    scratch_bound=1 << 20,
)
"""Sizes for a CPU."""
_SETTLE_RUNS = 64
_TELL_SECONDS = 30.0  # from one line about the load to the next
LOG = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak, and print its report as JSON.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        0 if everything held for as long as asked, 1 if not; what did not is told on stderr, as is how far it is.
    """
    parser = argparse.ArgumentParser(
        prog="trellis-moe soak", description="Run layers for long, and watch bits and bytes."
    )
    parser.add_argument("--seconds", type=float, default=500.0, help="of the load (default 500)")
    parser.add_argument("--runs", type=int, default=10_000, help="made in any case (default 10000)")
    parser.add_argument("--device", default=None, help="default: a GPU where there is one")
    parser.add_argument("--jobs", type=int, default=None, help="processes that compile (default: one a CPU)")
    parser.add_argument("--json", type=Path, default=None, help="file that gets the report too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = SoakSizes() if device.type == "cuda" else SMALL
    if not LOG.hasHandlers():
        logging.basicConfig(format="trellis-moe soak: %(message)s")
        LOG.setLevel(logging.INFO)
    with _ends_when_told() as ends:
        report = soak(sizes, device, seconds=options.seconds, runs=options.runs, jobs=options.jobs, ends=ends)
    text = report.model_dump_json(by_alias=True, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    for failure in report.failures():
        print(f"trellis-moe soak: {failure}", file=sys.stderr)
    return 1 if report.failures() else 0


@contextmanager
def _ends_when_told() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM and SIGINT end a load rather than the process; gives whether one came."""
    came: list[int] = []
    kept = {
        number: signal.signal(number, lambda got, _: came.append(got)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def soak(
    sizes: SoakSizes,
    device: torch.device,
    *,
    seconds: float,
    runs: int,
    jobs: int | None = None,
    ends: Callable[[], bool] = lambda: False,
) -> SoakReport:
    """Plan, compile, freeze, bind, and run for long.

    Args:
        sizes: of the soak.
        device: where.
        seconds: of the load.
        runs: made in any case.
        jobs: processes that compile.
        ends: whether the load is to end early.
    """
    session, begin = Session(), time.monotonic()
    plans = plan_layers(sizes, device)
    session.prepare(plans, jobs=jobs)
    compiled = time.monotonic() - begin
    LOG.info("%d kernels are ready after %.1f seconds", session.kernel_count, compiled)
    try:
        kernels = session.kernel_count
        layers, arena = bind_layers(plans, device)
        graphs = None
        if device.type == "cuda":
            graphs = Graphs(layers, tuple(count for count in GRAPH_COUNTS if count <= sizes.max_tokens))
        run_load(layers, arena, graphs, seconds=0.0, least_runs=_SETTLE_RUNS, seed=1)
        LOG.info("%d layers are bound; the load begins after %.1f seconds", len(layers), time.monotonic() - begin)
        before = _bytes(device)
        outcome = run_load(
            layers, arena, graphs, seconds=seconds, least_runs=runs, seed=2, ends=_Teller(seconds, ends).see
        )
        after = _bytes(device)
        return _report(
            device, plans, layers, outcome, seconds, compiled, (kernels, session.kernel_count), before, after
        )
    finally:
        session.thaw()


class _Teller:
    """Tells how far a load is, and whether it is to end."""

    def __init__(self, seconds: float, ends: Callable[[], bool]) -> None:
        self._seconds, self._ends = seconds, ends
        self._next = _TELL_SECONDS

    def see(self, outcome: Outcome) -> bool:
        """Look at a load after a run; whether it is to end."""
        if outcome.seconds >= self._next:
            self._next += _TELL_SECONDS
            LOG.info(
                "%.0f of %.0f seconds, %d runs, %d with other bits",
                outcome.seconds, self._seconds, sum(outcome.runs.values()), outcome.mismatch_count,
            )  # fmt: skip
        return self._ends()


def _bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has allocated and that it holds on a GPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def _report(
    device: torch.device,
    plans: list[ExecutionPlan],
    layers: list[SoakLayer],
    outcome: Outcome,
    asked_seconds: float,
    compile_seconds: float,
    kernels: tuple[int, int],
    before: tuple[int, int],
    after: tuple[int, int],
) -> SoakReport:
    return SoakReport(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        asked_seconds=asked_seconds,
        seconds=outcome.seconds,
        compile_seconds=compile_seconds,
        runs=dict(outcome.runs),
        tokens=dict(sorted(outcome.tokens.items())),
        mismatches=outcome.mismatch_count,
        first_mismatches=tuple(outcome.mismatches),
        kernels_before=kernels[0],
        kernels_after=kernels[1],
        allocated_before=before[0],
        allocated_after=after[0],
        reserved_before=before[1],
        reserved_after=after[1],
        scratch_nbytes=max(plan.required_nbytes() for plan in plans),
        layers=tuple(map(_layer_report, layers)),
    )


def _layer_report(layer: SoakLayer) -> LayerReport:
    source = layer.binding.plan.weights.source
    rates = "/".join(str(rate) for rate in source.rates.distinct())
    law = layer.binding.plan.activation.nonlinearity.kind
    return LayerReport(
        weights=f"{source.codebook} K={rates} {law}", launches=layer.binding.counters, errors=layer.errors
    )
