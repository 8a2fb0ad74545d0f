"""Owns what the command says: rows of a run, as text and as JSON, and the line that shows progress.

It must not prepare, nor know where numbers come from.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from trellis_format.terminal import printable
from trellis_prep.measure import sample_rate

__all__ = ["SCHEMA", "LayerRow", "ProgressLine", "RunReport", "write_text"]

SCHEMA = "trellis-prep/prepare/1"
"""Schema and version of the JSON document."""
_REDRAW_SECONDS = 0.1
_BAR = 30


@dataclass(frozen=True)
class LayerRow:
    """One layer of a run.

    Attributes:
        layer: index.
        path: of its experts in the checkpoint.
        first_channel: of this rank's extent.
        channels: of this rank's extent.
        owners: bytes of codes and of each table.
        staging_bytes: bytes of the host ring.
        seconds: wall time, or the expected one in a dry run; None where nothing tells.
        host_peak_above_weights: bytes of host memory beyond the weights and what there was before; None if unknown.
        device_peak_above_weights: the same on the device; None on a CPU or in a dry run.
    """

    layer: int
    path: str
    first_channel: int
    channels: int
    owners: dict[str, int]
    staging_bytes: int
    seconds: float | None
    host_peak_above_weights: int | None = None
    device_peak_above_weights: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())


@dataclass(frozen=True)
class RunReport:
    """A run or a dry run over layers.

    Attributes:
        checkpoint: its folder.
        device: destination.
        tp_rank: this rank.
        tp_size: ranks that share the intermediate axis.
        max_bytes: staging bound.
        dry_run: whether nothing was prepared.
        sampled_bytes: bytes that were read to expect a time.
        sampled_seconds: how long that took.
        layers: the rows.
    """

    checkpoint: str
    device: str
    tp_rank: int
    tp_size: int
    max_bytes: int
    dry_run: bool
    sampled_bytes: int
    sampled_seconds: float
    layers: tuple[LayerRow, ...]

    @property
    def owners(self) -> dict[str, int]:
        """Bytes of each owner over all layers."""
        totals: dict[str, int] = {}
        for row in self.layers:
            for name, nbytes in row.owners.items():
                totals[name] = totals.get(name, 0) + nbytes
        return totals

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(row.nbytes for row in self.layers)

    @property
    def seconds(self) -> float | None:
        """Time of all layers; None where that of one is not known."""
        known = [row.seconds for row in self.layers if row.seconds is not None]
        return sum(known) if len(known) == len(self.layers) else None

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        rows = [asdict(row) | {"bytes": row.nbytes, "gb_per_second": _rate(row)} for row in self.layers]
        head = {"schema": SCHEMA} | {name: value for name, value in asdict(self).items() if name != "layers"}
        total = {"owners": self.owners, "bytes": self.nbytes, "seconds": self.seconds}
        return head | {"layers": rows, "total": total}


class ProgressLine:
    """A bar that is drawn over itself on a terminal, and nothing elsewhere.

    Args:
        stream: where to draw.
        total: bytes at its end.
    """

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total = stream, total
        self._begin = self._drawn = time.perf_counter()
        self._on = stream.isatty()

    def update(self, done: int) -> None:
        """Draw again if that is due."""
        now = time.perf_counter()
        if not self._on or (done < self._total and now - self._drawn < _REDRAW_SECONDS):
            return
        self._drawn = now
        share = done / self._total if self._total else 1.0
        bar = "#" * int(_BAR * share)
        rate = sample_rate(done, now - self._begin)
        self._stream.write(f"\r[{bar:<{_BAR}}] {share:4.0%} of {self._total:,} bytes, {rate:.2f} GB/s ")
        self._stream.flush()

    def finish(self) -> None:
        """End the line."""
        if self._on:
            self._stream.write("\n")
            self._stream.flush()


def write_text(report: RunReport, stream: TextIO) -> None:
    """Write a report as text."""
    verb = "would take" if report.dry_run else "took"
    stream.write(
        f"{printable(report.checkpoint)}: rank {report.tp_rank} of {report.tp_size} on {report.device}, staging of at "
        f"most {report.max_bytes:,} bytes\n"
    )
    for row in report.layers:
        stream.write(
            f"layer {row.layer} ({printable(row.path)}): channels {row.first_channel}.."
            f"{row.first_channel + row.channels}, {row.nbytes:,} bytes, {verb} {_seconds(row.seconds)}"
            f"{_extras(row)}\n"
        )
    width = max(len(name) for name in (*report.owners, "all"))
    for name, nbytes in (*report.owners.items(), ("all", report.nbytes)):
        stream.write(f"  {name:<{width}}  {nbytes:>18,} bytes\n")
    stream.write(f"{len(report.layers)} layers {verb} {_seconds(report.seconds)}{_basis(report)}\n")


def _extras(row: LayerRow) -> str:
    rate = _rate(row)
    parts = [f"{rate:.2f} GB/s"] if rate is not None else []
    for place, peak in (("host", row.host_peak_above_weights), ("device", row.device_peak_above_weights)):
        if peak is not None:
            parts.append(f"{place} peak {peak:,} bytes above the weights")
    parts.append(f"host ring {row.staging_bytes:,} bytes")
    return ", " + ", ".join(parts)


def _basis(report: RunReport) -> str:
    if not report.dry_run or not report.sampled_bytes:
        return ""
    rate = sample_rate(report.sampled_bytes, report.sampled_seconds)
    return f", expected from a sample of {report.sampled_bytes:,} bytes read at {rate:.2f} GB/s"


def _rate(row: LayerRow) -> float | None:
    return None if row.seconds is None or row.seconds <= 0 else sample_rate(row.nbytes, row.seconds)


def _seconds(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.3f} s"
