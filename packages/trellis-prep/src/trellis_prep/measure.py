"""Owns the measurement of a preparation: time, and the most memory it took beyond its result.  It must not prepare."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["Measured", "Meter", "sample_rate"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # makes the kernel's high-water mark of resident memory start over
_GB = 1e9


@dataclass(frozen=True)
class Measured:
    """What a preparation took.

    Attributes:
        seconds: wall time.
        host_peak_bytes: most resident host memory beyond what there was before; None where the system does not tell.
        device_peak_bytes: most device memory that torch had handed out beyond what there was before; None on a CPU.
    """

    seconds: float
    host_peak_bytes: int | None
    device_peak_bytes: int | None

    def above(self, weight_bytes: int) -> tuple[int | None, int | None]:
        """(host, device) peaks beyond weights of `weight_bytes` that stay on the device, or on the host without one."""
        host, device = self.host_peak_bytes, self.device_peak_bytes
        if device is None:
            return (None if host is None else max(host - weight_bytes, 0)), None
        return host, max(device - weight_bytes, 0)


class Meter:
    """Measures what happens in its context.

    Args:
        device: where the weights go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._host, self._on_device = 0.0, 0, 0
        self.measured: Measured | None = None

    def __enter__(self) -> Meter:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._on_device = torch.cuda.memory_allocated(self._device)
        self._peak_known = _reset_peak()
        self._host = _resident("VmRSS") or 0
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        seconds = time.perf_counter() - self._begin
        peak = _resident("VmHWM") if self._peak_known else None
        on_device = None
        if self._device.type == "cuda":
            on_device = torch.cuda.max_memory_allocated(self._device) - self._on_device
        self.measured = Measured(seconds, None if peak is None else max(peak - self._host, 0), on_device)


def sample_rate(nbytes: int, seconds: float) -> float:
    """Gigabytes (10^9 bytes) per second."""
    return nbytes / _GB / max(seconds, 1e-9)


def _reset_peak() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _resident(name: str) -> int | None:
    """Bytes of a line of the process's status."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found.split()[1]) * 1024
