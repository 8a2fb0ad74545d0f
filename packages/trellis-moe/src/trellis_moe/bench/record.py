"""Owns the making of a receipt: ceilings, rows with their ratios, what was left out, and the time that is left.

It must not launch anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from trellis_kernels.bench.timing import Samples
from trellis_moe.bench.machine import Commit, machine, read_states, utc_now, versions
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.schema import (
    Case,
    Ceiling,
    Check,
    LayerCase,
    Memory,
    OpCase,
    ParallelCase,
    PrepareCase,
    Ratio,
    Receipt,
    Row,
    Skipped,
    Unit,
)

__all__ = ["COPY", "GEMM", "Recorder", "decode_ceiling", "describe", "pinned_copy"]

COPY = "device copy"
"""Name of the ceiling of memory: bytes read and written by a kernel that copies."""
GEMM = "bf16 GEMM"
"""Name of the ceiling of products: a dense product of large square matrices."""
_DIGITS = 6  # of a ratio, which the schema compares with what its row says


def decode_ceiling(codebook: str, k: str) -> str:
    """Name of the ceiling of decoding: weights from registers, with nothing done to them."""
    return f"decode {codebook} K={k} from registers"


def pinned_copy(layer: str, bound_bytes: int) -> str:
    """Name of the ceiling of a preparation: copies of as many bytes from one page-locked buffer, in turn with it."""
    return f"pinned copy beside {layer}, bound {bound_bytes / 2**20:g} MiB"


def describe(case: Case) -> str:
    """A case in one line."""
    if isinstance(case, LayerCase):
        what = f"{case.geometry} K={case.k} {case.codebook}, {case.tokens} tokens"
        return f"{what}, {case.contender} {case.arithmetic} {case.path}, {case.mode}"
    if isinstance(case, OpCase):
        return f"{case.op}, {case.case}, {case.mode}"
    if isinstance(case, ParallelCase):
        what = f"{case.geometry} K={case.k} {case.codebook}, {case.tokens} tokens"
        return f"{what}, {case.scheme}{case.ranks} {case.reduce}, {case.mode}"
    return f"prepare {case.layer}, {case.layers} held, bound {case.bound_bytes / 2**20:g} MiB"


class Recorder:
    """Collects one run.

    Args:
        device: of the measurements; `cpu` is a rehearsal.
        seconds: after which nothing further is begun.
        samples: of each row.
        tell: called with each line for the user.
        count: GPUs that take part.

    Raises:
        MoeValueError: if the state of a GPU cannot be read.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        seconds: float,
        samples: int,
        tell: Callable[[str], None],
        count: int = 1,
    ) -> None:
        self.device = device
        self.samples = samples
        self.tell = tell
        self._count = count
        self._created = utc_now()
        self._begin = time.monotonic()
        self._seconds = seconds
        self._start = read_states(device, count) if device.type == "cuda" else ()
        self._ceilings: dict[str, Ceiling] = {}
        self._rows: list[Row] = []
        self._skipped: list[Skipped] = []

    @property
    def mode(self) -> Literal["graph", "eager"]:
        """How a launch is timed first: in a graph where there is a GPU."""
        return "graph" if self.device.type == "cuda" else "eager"

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was recorded."""
        return tuple(self._rows)

    def attempt(self, what: str, do: Callable[[], None]) -> bool:
        """Do one measurement, unless the time is over; what fails is left out and said, and the run goes on.

        Args:
            what: in words.
            do: measures and records.

        Returns:
            Whether it was done.
        """
        if self.elapsed > self._seconds:
            self.skip(what, f"the {self._seconds:g} seconds were over")
            return False
        begin = time.monotonic()
        try:
            do()
        except Exception as error:  # noqa: BLE001  # one case's trouble must not lose the others; the receipt says it
            self.skip(what, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
            return False
        self.tell(f"[{self.elapsed:6.1f} s] {what}: {time.monotonic() - begin:.1f} s")
        return True

    def skip(self, what: str, why: str) -> None:
        """Record that something was left out."""
        self._skipped.append(Skipped(what=what, why=why))
        self.tell(f"[{self.elapsed:6.1f} s] left out {what}: {why}")

    def add_ceiling(self, name: str, unit: Unit, work: int, samples: Samples) -> None:
        """Record a ceiling; rows that come after it have their ratio to it.

        Raises:
            ValueError: if there is one of that name, to which rows have their ratio already.
        """
        if name in self._ceilings:
            raise ValueError(f"{name} was measured before")
        ceiling = Ceiling(name=name, unit=unit, work=work, samples_ns=samples.nanoseconds)
        self._ceilings[name] = ceiling
        self.tell(f"    {name}: {ceiling.rate / 1e12:.3f} T {unit}/s")

    def add_row(
        self,
        case: Case,
        samples: Samples,
        *,
        nbytes: int,
        flops: int,
        weights: int,
        check: Check,
        memory: Memory | None = None,
    ) -> Row:
        """Record a row, with its ratios to the ceilings of this run.

        Args:
            case: what was measured.
            samples: times.
            nbytes: bytes moved at the least.
            flops: floating-point operations.
            weights: weights decoded at the least.
            check: of what was timed.
            memory: where it is part of the measurement.

        Raises:
            ValueError: if the row is none, for example because its check failed.
        """
        counts: dict[Unit, int] = {"bytes": nbytes, "flops": flops, "weights": weights}
        names: dict[Unit, str] = {"bytes": COPY, "flops": GEMM}
        if isinstance(case, LayerCase):
            names["weights"] = decode_ceiling(case.codebook, case.k)
        if isinstance(case, PrepareCase):
            names["bytes"] = pinned_copy(case.layer, case.bound_bytes)
        ratios = []
        for unit, name in names.items():
            ceiling = self._ceilings.get(name)
            if counts[unit] and ceiling is not None:
                value = counts[unit] / samples.median * 1e9 / ceiling.rate
                ratios.append(Ratio(of=name, value=float(f"{value:.{_DIGITS}g}")))
        row = Row(
            case=case,
            samples_ns=samples.nanoseconds,
            bytes=nbytes,
            flops=flops,
            weights=weights,
            check=check,
            ratios=tuple(ratios),
            memory=memory,
        )
        self._rows.append(row)
        shares = ", ".join(f"{ratio.value:.1%} of {ratio.of}" for ratio in row.ratios)
        self.tell(f"    {describe(case)}: {row.median_ns / 1e3:.2f} us, error {check.error:.1e}; {shares}")
        return row

    def receipt(self, command: str, commit: Commit, *, goes_on: bool = False) -> Receipt:
        """What was collected; reads the state of the GPUs at the end.

        Args:
            command: that ran.
            commit: of the sources.
            goes_on: whether the run is not over, which is said among what was left out.

        Raises:
            MoeValueError: if nothing was measured, or the state of a GPU cannot be read.
        """
        if not self._rows or not self._ceilings:
            why = "; ".join(f"{each.what}: {each.why}" for each in self._skipped[:3])
            raise MoeValueError(f"nothing was measured, so there is no receipt ({why or 'nothing was asked for'})")
        rest = (Skipped(what="the rest", why="the run did not come to its end"),) if goes_on else ()
        return Receipt(
            command=command,
            commit=commit.name,
            dirty=commit.dirty,
            created=self._created,
            machine=machine(self.device, self._start, count=self._count),
            versions=versions(),
            ceilings=tuple(self._ceilings.values()),
            rows=tuple(self._rows),
            skipped=(*self._skipped, *rest),
        )
