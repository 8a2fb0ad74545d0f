"""Owns the kinds of figures that were asked for, and how each is read from receipts.  It must not hold any figure.

Every kind has `title`, `asked` and `found(receipts)`: the measured value with its text and whether it meets what was
asked, or None where no receipt has it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from trellis_moe.receipts.schema import LayerCase, OpCase, ParallelCase, PrepareCase, Receipt, Row

__all__ = [
    "CeilingRate",
    "EagerCost",
    "FinalBytes",
    "Found",
    "LayerTime",
    "NoCliff",
    "NoSlower",
    "OpRate",
    "OpSlowdown",
    "OpTime",
    "Scratch",
    "Speedup",
    "StagingPeak",
    "StagingRate",
    "Target",
    "layer_rows",
]

_MIB = 1 << 20


@dataclass(frozen=True)
class Found:
    """What receipts say of a figure.

    Attributes:
        value: in the unit of the figure.
        text: for a table.
        met: whether it is what was asked for.
    """

    value: float
    text: str
    met: bool


class Target(Protocol):
    """A figure that was asked for."""

    @property
    def title(self) -> str:
        """What is measured."""

    @property
    def asked(self) -> str:
        """What was asked for, with its unit."""

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        """What receipts say; None where none has it."""


def layer_rows(
    receipts: Iterable[Receipt],
    *,
    geometry: str,
    codebook: str,
    k: str,
    tokens: int | None = None,
    mode: str = "graph",
    contender: str = "trellis",
) -> Iterator[tuple[LayerCase, Row]]:
    """The rows of a layer, of all receipts; those of trellis with float16 in and out, which figures are asked for.

    Args:
        receipts: where to look.
        geometry: of the case, as all that follow.
        codebook: its name.
        k: rate.
        tokens: None takes every count.
        mode: `graph` or `eager`.
        contender: what ran.
    """
    for receipt in receipts:
        for row in receipt.rows:
            case = row.case
            if not isinstance(case, LayerCase):
                continue
            same = (case.geometry, case.codebook, case.k) == (geometry, codebook, k)
            same = same and (case.contender != "trellis" or case.io_dtype == "float16")
            if same and case.mode == mode and case.contender == contender and tokens in (None, case.tokens):
                yield case, row


@dataclass(frozen=True)
class _Layer:
    geometry: str
    codebook: str
    k: str

    @property
    def layer(self) -> str:
        """The geometry with its codes."""
        return f"{self.geometry} K={self.k} {self.codebook}"

    def _rows(
        self, receipts: Iterable[Receipt], tokens: int | None, mode: str = "graph"
    ) -> list[tuple[LayerCase, Row]]:
        return list(
            layer_rows(receipts, geometry=self.geometry, codebook=self.codebook, k=self.k, tokens=tokens, mode=mode)
        )


@dataclass(frozen=True)
class LayerTime(_Layer):
    """Milliseconds of a layer in a graph, of the fastest arithmetic that the plan names.

    Args:
        geometry, codebook, k: the layer.
        tokens: of a launch.
        milliseconds: at most.
    """

    tokens: int
    milliseconds: float

    @property
    def title(self) -> str:
        return f"{self.layer}, {self.tokens} tokens"

    @property
    def asked(self) -> str:
        return f"{self.milliseconds:g} ms"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        rows = self._rows(receipts, self.tokens)
        if not rows:
            return None
        case, row = min(rows, key=lambda each: each[1].median_ns)
        millis = row.median_ns / 1e6
        return Found(millis, f"{millis:.3f} ms ({case.arithmetic})", millis <= self.milliseconds)


@dataclass(frozen=True)
class EagerCost(_Layer):
    """Microseconds that a launch from Python takes beyond one in a graph.

    Args:
        geometry, codebook, k: the layer.
        tokens: of a launch.
        microseconds: at most.
    """

    tokens: int
    microseconds: float

    @property
    def title(self) -> str:
        return f"{self.layer}, {self.tokens} tokens, eager beyond graph"

    @property
    def asked(self) -> str:
        return f"{self.microseconds:g} us"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        kept = list(receipts)
        graphs = {case.arithmetic: row for case, row in self._rows(kept, self.tokens)}
        eager = {case.arithmetic: row for case, row in self._rows(kept, self.tokens, "eager")}
        both = graphs.keys() & eager.keys()
        if not both:
            return None
        extra = max((eager[name].median_ns - graphs[name].median_ns) / 1e3 for name in both)
        return Found(extra, f"{extra:.1f} us", extra <= self.microseconds)


@dataclass(frozen=True)
class NoSlower(_Layer):
    """Time of a layer over that of another contender of the same run, the two measured in turns.

    Args:
        geometry, codebook, k: the layer.
        tokens: of a launch.
        contender: the other.
        factor: at most.
    """

    tokens: int
    contender: str
    factor: float = 1.0

    @property
    def title(self) -> str:
        return f"{self.layer}, {self.tokens} tokens, over {self.contender}"

    @property
    def asked(self) -> str:
        return f"{self.factor:g} x"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        for receipt in reversed(list(receipts)):
            ours, others = (
                [
                    row.median_ns
                    for _, row in layer_rows(
                        [receipt],
                        geometry=self.geometry,
                        codebook=self.codebook,
                        k=self.k,
                        tokens=self.tokens,
                        contender=name,
                    )
                ]
                for name in ("trellis", self.contender)
            )
            if ours and others:
                factor = min(ours) / min(others)
                return Found(factor, f"{factor:.2f} x", factor <= self.factor)
        return None


@dataclass(frozen=True)
class NoCliff(_Layer):
    """Largest step down in time from one token count to the next larger one, as a share of the time before.

    Args:
        geometry, codebook, k: the layer.
        share: at most.
        counts: token counts at the least, so that few points do not pass.
    """

    share: float
    counts: int = 8

    @property
    def title(self) -> str:
        return f"{self.layer}, time falls from a token count to the next by"

    @property
    def asked(self) -> str:
        return f"{self.share:.0%} at most"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        best: dict[int, float] = {}
        for case, row in self._rows(receipts, None):
            if case.arithmetic == "exact":
                best[case.tokens] = min(best.get(case.tokens, row.median_ns), row.median_ns)
        if len(best) < self.counts:
            return None
        times = [best[tokens] for tokens in sorted(best)]
        fall = max(0.0, *(1 - after / before for before, after in itertools.pairwise(times)))
        return Found(fall, f"{fall:.1%} over {len(best)} counts", fall <= self.share)


@dataclass(frozen=True)
class Scratch(_Layer):
    """Bytes of scratch of a launch, as its plan says and its binding takes.

    Args:
        geometry, codebook, k: the layer.
        tokens: of a launch.
        nbytes: below.
    """

    tokens: int
    nbytes: int

    @property
    def title(self) -> str:
        return f"{self.layer}, {self.tokens} tokens, scratch"

    @property
    def asked(self) -> str:
        return f"{self.nbytes / _MIB:g} MiB"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        rows = [row.memory for _, row in self._rows(receipts, self.tokens) if row.memory is not None]
        if not rows:
            return None
        most = max(memory.planned_bytes for memory in rows)
        equal = all(memory.final_bytes == memory.planned_bytes for memory in rows)
        return Found(most, f"{most / _MIB:.1f} MiB", most < self.nbytes and equal)


def _op_rows(receipts: Iterable[Receipt], op: str, case: str) -> Iterator[tuple[Receipt, Row]]:
    for receipt in receipts:
        for row in receipt.rows:
            if isinstance(row.case, OpCase) and (row.case.op, row.case.case) == (op, case):
                yield receipt, row


@dataclass(frozen=True)
class OpTime:
    """Microseconds of an op.

    Args:
        op, case: what.
        microseconds: below.
    """

    op: str
    case: str
    microseconds: float

    @property
    def title(self) -> str:
        return f"{self.op}, {self.case}"

    @property
    def asked(self) -> str:
        return f"{self.microseconds:g} us"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        times = [row.median_ns / 1e3 for _, row in _op_rows(receipts, self.op, self.case)]
        return Found(times[-1], f"{times[-1]:.1f} us", times[-1] < self.microseconds) if times else None


@dataclass(frozen=True)
class OpRate:
    """Bytes that an op moves, as a share of the device copy of the same run.

    Args:
        op, case: what.
        share: at least.
    """

    op: str
    case: str
    share: float

    @property
    def title(self) -> str:
        return f"{self.op}, {self.case}, of the device copy"

    @property
    def asked(self) -> str:
        return f"{self.share:.0%}"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        shares = [
            ratio.value
            for _, row in _op_rows(receipts, self.op, self.case)
            for ratio in row.ratios
            if ratio.of == "device copy"
        ]
        return Found(shares[-1], f"{shares[-1]:.1%}", shares[-1] >= self.share) if shares else None


@dataclass(frozen=True)
class OpSlowdown:
    """Time of one case of an op over that of another in the same run.

    Args:
        op: which.
        case: the slower one.
        other: the other.
        factor: at most.
    """

    op: str
    case: str
    other: str
    factor: float

    @property
    def title(self) -> str:
        return f"{self.op}, {self.case}, over {self.other.rsplit(', ', 1)[-1]}"

    @property
    def asked(self) -> str:
        return f"{self.factor:g} x"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        for receipt in reversed(list(receipts)):
            mine, others = (list(_op_rows([receipt], self.op, case)) for case in (self.case, self.other))
            if mine and others:
                factor = mine[0][1].median_ns / others[0][1].median_ns
                return Found(factor, f"{factor:.2f} x", factor <= self.factor)
        return None


@dataclass(frozen=True)
class CeilingRate:
    """What a ceiling reaches.

    Args:
        name: of the ceiling.
        rate: at least, in its unit a second; 0 asks for the number alone.
    """

    name: str
    rate: float = 0.0

    @property
    def title(self) -> str:
        return self.name

    @property
    def asked(self) -> str:
        return f"{self.rate / 1e12:g} T/s" if self.rate else "recorded"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        rates = [ceiling.rate for receipt in receipts for ceiling in receipt.ceilings if ceiling.name == self.name]
        return Found(rates[-1], f"{rates[-1] / 1e12:.2f} T/s", rates[-1] >= self.rate) if rates else None


def _preparations(receipts: Iterable[Receipt], layer: str, bound: int) -> Iterator[Row]:
    for receipt in receipts:
        for row in receipt.rows:
            if isinstance(row.case, PrepareCase) and (row.case.layer, row.case.bound_bytes) == (layer, bound):
                yield row


@dataclass(frozen=True)
class StagingRate:
    """Bytes a second of a preparation over those of a plain pinned copy of the same run.

    Args:
        layer: what is prepared.
        bound_bytes: of staging.
        share: at least.
    """

    layer: str
    bound_bytes: int
    share: float

    @property
    def title(self) -> str:
        return f"{self.layer}, bound {self.bound_bytes / _MIB:g} MiB, of a pinned copy"

    @property
    def asked(self) -> str:
        return f"{self.share:.0%}"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        rows = list(_preparations(receipts, self.layer, self.bound_bytes))
        if not rows:
            return None
        share, rate = rows[-1].ratios[0].value, rows[-1].rate("bytes")
        return Found(share, f"{share:.0%}, {rate / 1e9:.1f} GB/s", share >= self.share)


@dataclass(frozen=True)
class StagingPeak:
    """Bytes of a preparation beyond the final weights, over its bound.

    Args:
        layer: what is prepared.
        bound_bytes: of staging.
        place: `host` or `device`.
        above_bytes: beyond the bound at most.
    """

    layer: str
    bound_bytes: int
    place: str
    above_bytes: int

    @property
    def title(self) -> str:
        return f"{self.layer}, bound {self.bound_bytes / _MIB:g} MiB, extra bytes on the {self.place}"

    @property
    def asked(self) -> str:
        return f"{(self.bound_bytes + self.above_bytes) / _MIB:g} MiB"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        peaks = [
            row.memory.peak_host_bytes if self.place == "host" else row.memory.peak_device_bytes
            for row in _preparations(receipts, self.layer, self.bound_bytes)
            if row.memory is not None
        ]
        known = [peak for peak in peaks if peak is not None]
        if not known:
            return None
        return Found(known[-1], f"{known[-1] / _MIB:.1f} MiB", known[-1] <= self.bound_bytes + self.above_bytes)


@dataclass(frozen=True)
class FinalBytes:
    """Bytes of the prepared codes of a layer.

    Args:
        layer: what is prepared.
        nbytes: exactly, tables beside them.
    """

    layer: str
    nbytes: int

    @property
    def title(self) -> str:
        return f"{self.layer}, code bytes on the device"

    @property
    def asked(self) -> str:
        return f"{self.nbytes:,}"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        sizes = [
            row.case.code_bytes
            for receipt in receipts
            for row in receipt.rows
            if isinstance(row.case, PrepareCase) and row.case.layer == self.layer
        ]
        return Found(sizes[-1], f"{sizes[-1]:,}", sizes[-1] == self.nbytes) if sizes else None


@dataclass(frozen=True)
class Speedup:
    """Time on one rank over time on several, in the same run.

    Args:
        geometry, codebook, k: the layer.
        scheme: `tp` or `ep`.
        ranks: how many.
        tokens: of a launch.
        factor: at least.
    """

    geometry: str
    codebook: str
    k: str
    scheme: str
    ranks: int
    tokens: int
    factor: float

    @property
    def title(self) -> str:
        return f"{self.geometry} K={self.k} {self.codebook}, {self.scheme.upper()}{self.ranks}, {self.tokens} tokens"

    @property
    def asked(self) -> str:
        return f"{self.factor:g} x"

    def found(self, receipts: Iterable[Receipt]) -> Found | None:
        for receipt in reversed(list(receipts)):
            one, many = self._times(receipt, 1), self._times(receipt, self.ranks)
            if one and many:
                factor = min(one) / min(many)
                return Found(factor, f"{factor:.2f} x", factor >= self.factor)
        return None

    def _times(self, receipt: Receipt, ranks: int) -> list[float]:
        """Medians of every reduction in a graph; one rank has no scheme."""
        wanted = (self.geometry, self.codebook, self.k, self.tokens)
        return [
            statistics.median(row.samples_ns)
            for row in receipt.rows
            if isinstance(case := row.case, ParallelCase)
            and (case.geometry, case.codebook, case.k, case.tokens) == wanted
            and (case.ranks, case.mode) == (ranks, "graph")
            and (ranks == 1 or case.scheme == self.scheme)
        ]
